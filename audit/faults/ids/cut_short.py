"""Completions that end without an end token, before any limit, while others have one."""

from __future__ import annotations

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
_SHARE = 0.1  # of the lines that are cut short


def look(lines: Sequence[LoggedRollout], tokenizer: Tokenizer) -> str | None:
    """Completions that end without an end token, before any limit, while others have one.

    A limit is of the completion, of the whole sequence, or of a turn, which tokens of tools end.
    """
    lines = [x for x in lines if x.turn is None]
    ended = [x for x in lines if x.completion_ids[-1] in tokenizer.stop_ids]
    cut = [x for x in lines if x.completion_ids[-1] not in tokenizer.stop_ids and x.drawn()[-1]]
    sizes = [_sizes(x) for x in cut]
    limits = [max(lengths) for lengths in zip(*sizes, strict=True)]
    early = [
        x
        for x, size in zip(cut, sizes, strict=True)
        if not x.truncated and not any(n == limit for n, limit in zip(size, limits, strict=True))
    ]
    stop_strings = len({x.completion_ids[-1] for x in early}) == 1
    if not ended or len(early) < max(_LINES, _SHARE * len(lines)) or stop_strings:
        return None
    return (
        f"{len(early)} of {len(lines)} completions end without an end token, at "
        f"{len({len(x.completion_ids) for x in early})} lengths below the longest: something cut them after "
        "they were drawn."
    )


def _sizes(x: LoggedRollout) -> tuple[int, int, int]:
    """Tokens of the completion, of the whole sequence, and of the last turn."""
    undrawn = np.flatnonzero(~x.drawn())
    count, before = len(x.completion_ids), int(undrawn[-1]) + 1 if len(undrawn) else 0
    return count, len(x.prompt_ids) + count, count - before


def cut_without_an_end(w: World) -> Log:
    """A third of the completions lost their ends after they were drawn."""
    lines = []
    for i, x in enumerate(w.both(w.drawn())):
        n = 20 + 7 * (i % 5)
        if i % 3 or n >= len(x.completion):
            lines.append(x)
            continue
        lines.append(replace(x, completion=x.completion[:n], sampler=x.sampler[:n], trainer=x.trainer[:n]))
    return w.log(lines)


FAULT = Shown(
    name="completions cut without an end token",
    order=80,
    look=look,
    remedy="Hand on the completion as it was drawn, or mark it as truncated and leave it out. "
    "Where completions end at stop strings, nothing is wrong.",
    tries="completions cut without an end token, unless `finish_reason` says `length` or a turn reached "
    "the limit of turns",
    needs_tokenizer=True,
    plants=(Plant(group="ids", make=cut_without_an_end, named=("cut", "end token")),),
)
