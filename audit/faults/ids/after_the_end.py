"""Completions that go on after their end token, all with the same few ids of the template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...formats.record import LoggedRollout
from ..fault import Plant, Shown

if TYPE_CHECKING:
    from ....engine.tasks.tokenizer import Tokenizer
    from ..planting.world import Log, World


_LINES = 3  # that show it, for it to be none of a single line
_TAIL = 4  # tokens that a template writes after an end token, at most


def look(lines: Sequence[LoggedRollout], tokenizer: Tokenizer) -> str | None:
    """Completions that go on after their end token, all with the same few ids of the template."""
    tails: Counter[tuple[int, ...]] = Counter()
    for x in lines:
        ends = [i for i, token in enumerate(x.completion_ids) if token in tokenizer.stop_ids]
        if ends and ends[0] < len(x.completion_ids) - 1 and x.drawn()[ends[0] + 1 :].all():
            tails[x.completion_ids[ends[0] + 1 :]] += 1
    tail, count = tails.most_common(1)[0] if tails else ((), 0)
    if count < max(_LINES, sum(tails.values())) or len(tail) > _TAIL:
        return None
    return (
        f"{count} completions go on after their end token, all with {tokenizer.text(tail)!r}: the chat "
        "template wrote it, and it is trained as if it had been drawn."
    )


def newline_after_the_end(w: World) -> Log:
    """The template's line break behind the end token is in the completion, and trained."""
    lines = []
    for x in w.drawn():
        tail = w.newline if x.completion[-1] == w.end_id else []
        numbers = np.append(x.sampler, np.full(len(tail), -0.01, np.float32))
        lines.append(replace(x, completion=[*x.completion, *tail], sampler=np.float32(numbers)))
    return w.log(w.both(lines))


FAULT = Shown(
    name="a token that was never drawn",
    order=70,
    look=look,
    remedy="End a completion with its end token; what the template writes after it belongs to the next "
    "prompt.",
    tries="completions that go on after their end token with what the template writes there",
    needs_tokenizer=True,
    plants=(Plant(group="ids", make=newline_after_the_end, named=("never drawn", "after their end token")),),
)
