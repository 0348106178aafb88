"""Where the gradient of a weight goes: into an fp32 buffer of the pass, or back to autograd.

A trainer hands each pass an fp32 buffer for every weight (passes.py). The backward functions then add to it
in canonical order, and return nothing. So no gradient in a low precision ever exists, and no gradient of a
whole batch. Without a buffer the same sum starts from zero. It is returned to autograd, rounded once to the
weight's dtype.
"""

from collections.abc import Iterable

import torch

from .order import TokenBlocks
from .partial_sums import PartialSums


class PendingSums:
    """Partial sums of several weights that wait, so that one launch adds many of them.

    A weight waits once at most: the sums that come first are added first. What waits keeps little memory
    alive: a layer's partial sums are made while its activations, which are larger, are freed.
    """

    def __init__(self) -> None:
        self._waiting: dict[torch.Tensor, PartialSums] = {}  # by the weight's sums

    def add(self, partial_sums: PartialSums) -> None:
        """Let these wait. The weight's own that wait are added before."""
        if partial_sums.sums in self._waiting:
            self.finish()
        self._waiting[partial_sums.sums] = partial_sums

    def finish(self) -> None:
        """Add all that waits to its sums."""
        if self._waiting:
            from .columns_triton import add_all_partials

            waiting, self._waiting = list(self._waiting.values()), {}
            add_all_partials(waiting)


class GradBuffer:
    """The sums of one weight's gradient, one for each virtual shard that a pass may hold.

    sums [shards, *shape] in fp32 (fp64 for fp64 weights).
    empty: the shards whose sum counts as zero, whatever the memory holds. So the trainer need not zero a
    large buffer before a step: the first sum is written over it.
    pending: where partial sums of several buffers wait; None if none wait. `sums` is read after them.
    """

    def __init__(self, sums: torch.Tensor, empty: Iterable[int] = (), pending: PendingSums | None = None):
        self._sums, self.empty, self._pending = sums, set(empty), pending

    @property
    def sums(self) -> torch.Tensor:
        """The sums, after all that waited was added."""
        if self._pending is not None:
            self._pending.finish()
        return self._sums

    @classmethod
    def like(cls, weight: torch.Tensor) -> "GradBuffer":
        """A new and empty buffer of one shard."""
        dtype = accumulate_dtype(weight.dtype)
        return cls(torch.empty(1, *weight.shape, dtype=dtype, device=weight.device), [0])

    def zeroed(self, shards: Iterable[int]) -> torch.Tensor:
        """The sums, after those of these shards that are empty were zeroed."""
        self._zero(shards)
        return self.sums

    def add_partials(self, partial: torch.Tensor, blocks: TokenBlocks, rows: int) -> None:
        """Add partial sums on a GPU (columns_triton.add_partials), now or together with those of others."""
        self._zero(blocks.shards)
        pending = self._pending or PendingSums()
        pending.add(PartialSums(self._sums, partial, blocks, rows))
        if self._pending is None:
            pending.finish()

    def begin(self, blocks: TokenBlocks) -> bool:
        """Begin a sum over `blocks`. Returns whether it must be written over the buffer, as all is empty.

        Otherwise the empty shards among them were zeroed, and the sum must be added. Afterwards no shard of
        `blocks` is empty.
        """
        all_empty = self.empty.issuperset(blocks.shards)
        if all_empty:
            self.empty.difference_update(blocks.shards)
        else:
            self._zero(blocks.shards)
        return all_empty

    def _zero(self, shards: Iterable[int]) -> None:
        for shard in self.empty.intersection(shards):
            self._sums[shard].zero_()
        self.empty.difference_update(shards)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: fp32, or fp64 for fp64 inputs, the judge of the tests."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_dtype(op: str, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless all tensors share one of the supported dtypes."""
    supported = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    (first, x), *rest = tensors.items()
    if x.dtype not in supported:
        raise ValueError(f"{op}: {first}.dtype ({x.dtype}) must be float32, bfloat16, float16 or float64")
    for name, tensor in rest:
        if tensor.dtype != x.dtype:
            raise ValueError(
                f"{op}: {name}.dtype ({tensor.dtype}) must equal {first}.dtype ({x.dtype}); "
                "convert one of them"
            )
