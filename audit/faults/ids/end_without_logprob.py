"""Completions whose end token alone is masked, or has no log-probability."""

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


def look(lines: Sequence[LoggedRollout], tokenizer: Tokenizer) -> str | None:
    """Completions whose end token alone is masked, or has no log-probability."""
    ended = [x for x in lines if x.completion_ids[-1] in tokenizer.stop_ids and len(x.completion_ids) > 1]
    without = []
    for x in ended:
        known = x.drawn() & ~np.isnan(x.logprobs) if x.logprobs is not None else x.drawn()
        without.append(not known[-1] and bool(known[:-1].all()))
    if sum(without) < _LINES or sum(without) < len(ended) / 2:
        return None
    return (
        f"in {sum(without)} of {len(ended)} completions that end, the end token is masked or has no "
        "log-probability, and all other tokens have one. The model drew it, too."
    )


def end_token_without_a_logprob(w: World) -> Log:
    """A server that does not report the end token."""
    lines = w.both(w.drawn())
    ends = [np.array(x.completion) == w.end_id for x in lines]
    return w.log(
        [
            replace(x, sampler=np.where(e, np.float32(np.nan), x.sampler), extra={"mask": (~e).tolist()})
            for x, e in zip(lines, ends, strict=True)
        ]
    )


FAULT = Shown(
    name="end token without a log-probability",
    order=90,
    look=look,
    remedy="Log its log-probability and train on it, or the model unlearns to stop.",
    tries="completions whose end token alone is masked, or has no log-probability",
    needs_tokenizer=True,
    plants=(Plant(group="ids", make=end_token_without_a_logprob, named=("end token",)),),
)
