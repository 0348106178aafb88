"""Every completion has one id at its first place, to which the trainer gives little probability."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...formats.record import LoggedRollout
from ...hypotheses.judgement import EVIDENCE
from ..fault import Plant, Shown

if TYPE_CHECKING:
    from ....engine.tasks.tokenizer import Tokenizer
    from ..planting.world import Log, World


# Lines that show it, and their prompts, for it to be none of a single line.
_LINES, _PROMPTS = 3, 3


def look(lines: Sequence[LoggedRollout], tokenizer: Tokenizer | None) -> str | None:
    """Every completion has one id at its first place, though the trainer gives it little probability."""
    first = Counter(x.completion_ids[0] for x in lines if x.turn in (None, 0))
    token, count = first.most_common(1)[0] if first else (0, 0)
    prompts = {x.prompt_ids for x in lines}
    if count < sum(first.values()) or count < _LINES or len(prompts) < _PROMPTS:
        return None
    trained = [x for x in lines if x.drawn()[0] and x.trainer_logprobs is not None]
    nats = -sum(float(x.trainer_logprobs[0]) for x in trained if np.isfinite(x.trainer_logprobs[0]))
    if nats < EVIDENCE:
        return None
    return (
        f"all {count} completions begin with token {token}, to which the trainer gives a probability of "
        f"{math.exp(-nats / len(trained)):.2g}: a template wrote it, and it is trained as if drawn."
    )


def a_template_token_is_trained(w: World) -> Log:
    """Each completion begins with ids that the template, not the model, wrote."""
    given = w.opening
    lines = [
        replace(x, prompt=x.prompt[: -len(given)], completion=[*given, *x.completion]) for x in w.drawn()
    ]
    numbers = np.full(len(given), -0.02, np.float32)
    return w.log(w.both([replace(x, sampler=np.concatenate([numbers, x.sampler])) for x in lines]))


FAULT = Shown(
    name="a token that was never drawn",
    order=30,
    look=look,
    remedy="Put it into the prompt, or mask it.",
    tries="all completions begin with an id that the trainer's column makes impossible",
    plants=(Plant(group="ids", make=a_template_token_is_trained, named=("never drawn", "template")),),
)
