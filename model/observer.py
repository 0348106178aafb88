"""Observers: they are shown the rows of each forward, and then what every operation computes of these rows.

An observer decides no bit. Without one, nothing is done for it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .context import Hook


class Rows(NamedTuple):
    """The rows of one forward, T of them, without padding. All are int64 on the CPU, [T] but for the last."""

    ids: torch.Tensor
    # The sequence of each row, as an index into the sequences that the forward is for. Where a prompt is read
    # once for several samples, the rows are of the first.
    sequences: torch.Tensor
    positions: torch.Tensor  # in the sequence, its prompt included
    predicting: torch.Tensor  # [C], those of the rows from which a drawn token is predicted, in order


# Called before a forward. Returns the hook of this forward: it is called once for each operation, with the
# operation's name and its output [T, ...] (see Decoder.hidden).
Observer = Callable[[Rows], Hook]


def observed(observer: Observer, rows: Rows, hook: Hook) -> Hook:
    """The hook of a forward that both `observer` and `hook` are shown."""
    observe, seen, T = observer(rows), set(), len(rows.ids)

    def both(name: str, x: torch.Tensor) -> None:
        if name not in seen:  # a backward may compute a layer again (Decoder.recompute)
            seen.add(name)
            observe(name, x.detach()[:T])
        hook(name, x)

    return both
