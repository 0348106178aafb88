"""Token embedding.

    x_t = w[id_t]          dw[v] = sum over t with id_t = v of dx_t

Shapes: ids [T] int64; w [V, D]; x, dx [T, D].
Roundings: none in the forward. dw is summed in fp32.
Order: dw is summed token after token, in canonical order.
"""

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from .backend import on_triton
from .leaves import WHOLE, Leaves
from .passes import ONE_SEQUENCE, Pass
from .shared_rows import SharedRows

if TYPE_CHECKING:
    from .embedding_triton import SortedIds


def embedding_ref(ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Forward only."""
    return w.index_select(0, ids)


def embedding_bwd_ref(acc: torch.Tensor, ids: torch.Tensor, dx: torch.Tensor) -> None:
    """acc [V, D] += the gradient. ids [T] int64, dx [T, D]."""
    acc.index_add_(0, ids, dx.to(acc.dtype))  # on a CPU index_add_ adds the rows one after another


def _forward(ids: torch.Tensor, w: torch.Tensor, leaves: Leaves) -> torch.Tensor:
    """The rows of w, of which each rank has a part; each row is carried by its owner."""
    if leaves.ranks.size == 1:
        return embedding_ref(ids, w)
    rows, own_ids = leaves.owned(ids, len(w))
    x = w.new_zeros(len(ids), w.shape[1]).index_copy_(0, rows, embedding_ref(own_ids, w))
    return leaves.of_owners(x, ids // len(w))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, w, in_pass, leaves):
        ctx.save_for_backward(ids)
        ctx.w, ctx.in_pass, ctx.leaves = w, in_pass, leaves
        return _forward(ids, w, leaves)

    @staticmethod
    def backward(ctx, dx):
        (ids,) = ctx.saved_tensors
        in_pass = ctx.in_pass.over(dx)
        blocks, buffer, shared = in_pass.blocks, in_pass.buffer(ctx.w), in_pass.shared
        ids, dx, layers = shared.whole(ids), shared.whole(dx), ctx.leaves.ranks
        if layers.size > 1:  # w has this rank's rows
            ids = ids - layers.rank * len(ctx.w)
        is_cut = layers.size * shared.size > 1
        sums = buffer.zeroed(blocks.shards)
        for shard, shard_blocks in blocks.parts:
            if shard_blocks:
                rows = slice(shard_blocks[0][0], shard_blocks[-1][1])
                part = ids[rows], dx[rows]
                _backward(sums[shard], *(_owned(*part, sums.shape[1], shared) if is_cut else part))
        return None, in_pass.returned_grad(ctx.w, buffer), None, None


def _owned(ids: torch.Tensor, dx: torch.Tensor, V: int, shared: SharedRows) -> tuple[torch.Tensor, ...]:
    """The ids and rows of dx that add to this rank's V rows of w. ids: of those that it reads."""
    rows, ids = shared.owned(ids, V)
    return ids, dx[rows]


def _backward(acc: torch.Tensor, ids: torch.Tensor, dx: torch.Tensor) -> None:
    if on_triton(dx):
        from .embedding_triton import embedding_bwd, sorted_ids

        embedding_bwd(acc, sorted_ids(ids), dx)
    else:
        embedding_bwd_ref(acc, ids, dx)


class RowIds:
    """Rows that several tensors are read at, [T] int64. Their order by value is found once for all."""

    def __init__(self, ids: torch.Tensor):
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def sorted(self) -> "SortedIds":
        """The ids in ascending order, and where each one was."""
        from .embedding_triton import sorted_ids

        return sorted_ids(self.ids)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, w, in_pass):
        ctx.rows, ctx.w, ctx.in_pass = rows, w, in_pass
        return embedding_ref(rows.ids, w)

    @staticmethod
    def backward(ctx, dx):
        buffer = ctx.in_pass.buffer(ctx.w)
        (acc,) = buffer.zeroed([0])
        if on_triton(dx):
            from .embedding_triton import embedding_bwd

            embedding_bwd(acc, ctx.rows.sorted, dx)
        else:
            embedding_bwd_ref(acc, ctx.rows.ids, dx)
        return None, ctx.in_pass.returned_grad(ctx.w, buffer), None


def read_rows(rows: RowIds, w: torch.Tensor, in_pass: Pass) -> torch.Tensor:
    """Rows of w [V, D] -> [T, D]: `embedding` with one virtual shard, for rows that are known to be there.

    The gradient adds up one row after another.
    """
    return _Rows.apply(rows, w, in_pass) if torch.is_grad_enabled() else embedding_ref(rows.ids, w)


def check_ids(ids: torch.Tensor, V: int) -> None:
    """Raise ValueError for an id outside 0..V-1.

    Ids on a GPU are not checked: the host would have to wait for the GPU to read them back.
    """
    if ids.device.type == "cpu" and ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < V):
        raise ValueError(
            f"embedding: ids must lie in 0..{V - 1}, got {int(ids.min())}..{int(ids.max())}; "
            "the tokenizer does not fit the model's vocabulary"
        )


def embedding(
    ids: torch.Tensor, w: torch.Tensor, in_pass: Pass = ONE_SEQUENCE, leaves: Leaves = WHOLE
) -> torch.Tensor:
    """Rows of w. ids [T] int64, w [V, D] -> [T, D]. Raises ValueError for an id outside 0..V-1.

    leaves: of the ranks that share w. Each has V of its rows then, and the ids count those of all.

    Of the pass's token blocks only the first row and the end of each shard decide anything: rows in no block
    have no gradient. The host must know them.

    Ids on a GPU are not checked here. Code that makes ids on the host checks them there (check_ids, as
    Decoder.hidden does). A wrong id that was made on the GPU ends in a device-side assertion of torch's
    index_select.
    """
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(
            f"embedding: ids must be a one-dimensional int64 tensor, got {ids.dtype} {tuple(ids.shape)}"
        )
    check_ids(ids, w.shape[0] * leaves.ranks.size)
    if not torch.is_grad_enabled():  # a decoding turn makes no token blocks
        return _forward(ids, w, leaves)
    return _Embedding.apply(ids, w, in_pass, leaves)
