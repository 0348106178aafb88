"""Where the gradient of a weight goes: into the weight's fp32 buffer, or back to autograd.

A trainer gives each weight an fp32 tensor `main_grad` of the weight's shape. The backward functions then add
to `main_grad` in canonical order, and return nothing. So no gradient in a low precision ever exists, and no
gradient of a whole batch. Without `main_grad` the same sum starts from zero. It is returned to autograd,
rounded once to the weight's dtype.

A pass may hold the rows of several virtual shards. Each shard has its own buffer then: `main_grad` has one
more axis, and the token blocks are ShardBlocks.

The trainer need not zero a large buffer before a step. It lists the buffer's shards in the set
`main_grad.empty_shards` instead. What an empty buffer holds is never read: the first sum is written over it.
"""

from collections.abc import Iterator

import torch

from .order import Blocks, PassBlocks, ShardBlocks


def grad_buffer(weight: torch.Tensor) -> torch.Tensor:
    """The tensor to add the weight's gradient to, in fp32 (fp64 for fp64 weights)."""
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return torch.zeros(weight.shape, dtype=accumulate_dtype(weight.dtype), device=weight.device)
    return buffer


def by_shard(buffer: torch.Tensor, blocks: PassBlocks) -> Iterator[tuple[torch.Tensor, Blocks]]:
    """The buffer and the token blocks of each virtual shard of a pass; without shards, those of the pass.

    An empty buffer is zeroed first.
    """
    for shard_buffer, shard_blocks, empty in by_shard_or_empty(buffer, blocks):
        yield shard_buffer.zero_() if empty else shard_buffer, shard_blocks


def by_shard_or_empty(
    buffer: torch.Tensor, blocks: PassBlocks
) -> Iterator[tuple[torch.Tensor, Blocks, bool]]:
    """As by_shard, and whether the buffer is empty. The caller then writes its sum over the buffer.

    A shard without rows is left out, so its buffer stays empty.
    """
    empty_shards = getattr(buffer, "empty_shards", set())
    if isinstance(blocks, ShardBlocks):
        parts = [(i, buffer[i], part) for i, part in zip(blocks.shards, blocks.blocks, strict=True)]
    else:
        parts = [(0, buffer, blocks)]
    for shard, shard_buffer, shard_blocks in parts:
        if shard_blocks:
            yield shard_buffer, shard_blocks, shard in empty_shards
            empty_shards.discard(shard)


def returned_grad(weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor | None:
    """The value that a backward function returns for `weight`, after it has added to `buffer`."""
    return None if getattr(weight, "main_grad", None) is buffer else buffer.to(weight.dtype)


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
