"""Completions that begin with the template's generation prompt, which their prompts lack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...formats.record import LoggedRollout
from ..chat_template import generation_prompt
from ..fault import Plant, Shown

if TYPE_CHECKING:
    from ....engine.tasks.tokenizer import Tokenizer
    from ..planting.world import Log, World


_LINES = 3  # that show it, for it to be none of a single line


def look(lines: Sequence[LoggedRollout], tokenizer: Tokenizer) -> str | None:
    """Completions that begin with the template's generation prompt, which their prompts lack."""
    if not (opening := generation_prompt(tokenizer)):
        return None
    n = len(opening)
    wrong = [x for x in lines if x.completion_ids[:n] == opening and x.prompt_ids[-n:] != opening]
    wrong = [x for x in wrong if x.drawn()[:n].all()]
    if len(wrong) < max(_LINES, len(lines) // 2):
        return None
    return (
        f"{len(wrong)} completions begin with the chat template's generation prompt "
        f"({tokenizer.text(opening)!r}), which their prompts lack: the template wrote it, and it is trained "
        "as if it had been drawn."
    )


def prompts_without_a_generation_prompt(w: World) -> Log:
    """Prompts were rendered without it; the model wrote it itself, as it was trained to."""
    n = len(w.opening)
    lines = [replace(x, prompt=x.prompt[:-n], completion=[*w.opening, *x.completion]) for x in w.drawn()]
    numbers = np.full(n, -0.01, np.float32)
    lines = [replace(x, sampler=np.concatenate([numbers, x.sampler])) for x in lines]
    return w.log(lines)


FAULT = Shown(
    name="a token that was never drawn",
    order=60,
    look=look,
    remedy="Render prompts with add_generation_prompt=True; a completion begins with what was drawn.",
    tries="completions that begin with the template's generation prompt, which their prompts lack",
    needs_tokenizer=True,
    plants=(Plant(group="ids", make=prompts_without_a_generation_prompt, named=("never drawn",)),),
)
