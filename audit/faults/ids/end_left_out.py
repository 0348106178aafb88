"""No completion ends with an end token, though they end at different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...formats.record import LoggedRollout
from ..fault import Plant, Shown

if TYPE_CHECKING:
    from ....engine.tasks.tokenizer import Tokenizer
    from ..planting.world import Log, World


_FEWEST = 4  # completions from which the lack of an end token is told


def look(lines: Sequence[LoggedRollout], tokenizer: Tokenizer) -> str | None:
    """No completion ends with an end token, though they end at different lengths."""
    lengths = [len(x.completion_ids) for x in lines]
    short = [x for x in lines if len(x.completion_ids) < max(lengths, default=0) and not x.truncated]
    if len(short) < _FEWEST or any(tokenizer.stop_ids & set(x.completion_ids) for x in lines):
        return None
    if any(x.turn is not None for x in lines):
        return None  # a turn ends where its tool is called
    return (
        f"none of {len(short)} completions that end before the longest one holds an end token "
        f"({', '.join(map(str, sorted(tokenizer.stop_ids)))}): the log, or the trainer, leaves it out."
    )


def end_tokens_stripped(w: World) -> Log:
    """A server that returns the text before the stop token."""
    lines = [
        replace(x, completion=x.completion[:-1], sampler=x.sampler[:-1])
        if x.completion[-1] == w.end_id
        else x
        for x in w.drawn()
    ]
    return w.log(w.both(lines))


FAULT = Shown(
    name="end token left out",
    order=40,
    look=look,
    remedy="Keep the end token in the completion and train on it, or the model unlearns to stop. "
    "Where completions end at stop strings, nothing is wrong.",
    tries="completions of different lengths, none with an end token",
    needs_tokenizer=True,
    plants=(Plant(group="ids", make=end_tokens_stripped),),
)
