"""Triton kernel of the gradient of embedding.py. No atomics.

    dw[v] += dx_t          for the tokens t with id_t = v, one after another in canonical order

The ids are sorted stably, so that the tokens of one v stand together in canonical order. The program of the
first of these tokens owns the row of v. It adds all of them to the row of the fp32 buffer, token after token.
So the split into micro-batches changes no bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import ceil_div, dense, launch

# Columns of one program, and its warps. They decide no bit: each column is a sum of its own.
TILE, WARPS = 256, 1


@triton.jit(do_not_specialize_on_alignment=["acc_ptr"])
def _embedding_bwd(ids_ptr, ends_ptr, order_ptr, dx_ptr, acc_ptr, D, TILE: tl.constexpr):
    first = tl.program_id(0)
    v = tl.load(ids_ptr + first)
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1)
    if v != before:
        cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
        mask = cols < D
        row = acc_ptr + v * D + cols
        acc = tl.load(row, mask=mask, other=0.0)
        end = tl.load(ends_ptr + first)
        for i in range(first, end):
            t = tl.load(order_ptr + i)
            acc += tl.load(dx_ptr + t * D + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(row, acc, mask=mask)


class SortedIds(NamedTuple):
    """Ids in ascending order, those that are equal in canonical order. [T] each."""

    ids: torch.Tensor
    ends: torch.Tensor  # int32, the place after the last id that is equal
    order: torch.Tensor  # where each id stood


def sorted_ids(ids: torch.Tensor) -> SortedIds:
    """ids [T] int64, sorted stably."""
    ordered, order = torch.sort(ids, stable=True)
    return SortedIds(ordered, torch.searchsorted(ordered, ordered, right=True, out_int32=True), order)


def embedding_bwd(acc: torch.Tensor, ids: SortedIds, dx: torch.Tensor) -> None:
    """acc [V, D] fp32 += the gradient. dx [T, D]."""
    T, D = dx.shape
    launch(
        _embedding_bwd,
        (T, ceil_div(D, TILE)),
        ids.ids,
        ids.ends,
        ids.order,
        dense(dx),
        acc,
        D,
        TILE=TILE,
        num_warps=WARPS,
    )
