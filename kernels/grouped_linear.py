"""Linear projection of each token by the matrices of its experts.

    y_r = x_t w_e^T     of a row r = (expert e, token t)
    dx_t = sum over the slots of t of dy_r w_e          dw_e = sum over the rows of e of dy_r^T x_t

Shapes: x [T, K]; w [E N, K] holds the matrices [N, K] of the experts one after another; y [R, N]. T tokens,
R rows (expert_rows.py), E experts.
Roundings: y is rounded once. dy_r w_e is rounded once, then the slots are added in fp32, slot after slot, and
the sum is rounded once. dw is not rounded where the pass has fp32 buffers (grad.py).
Order: a row has the bits of `linear` with the matrix of its expert: no row knows another. dw_e is summed over
the sequences of the pass, in their order. The rows of e in a sequence are cut into token blocks of their own:
a block of 128 tokens has few of them (8, if a token has 8 of 128 experts), and a GPU multiplies tiles of 32
rows. Blocks that span sequences would depend on the micro-batch. The experts of other tokens change nothing.
The gradients of LoRA adapters of the experts' matrices (low_rank.py) have the same order.
"""

from functools import cache

import torch

from ..files.bitwise import equal
from .backend import on_triton
from .expert_rows import ExpertRows, Rows
from .grad import GradBuffer, accumulate_dtype, check_dtype
from .low_rank import LowRankBuffers, low_rank_rows
from .matmul import THROUGH_FP32, add_outer_ref, matmul_ref
from .order import ALIGN, TokenBlocks
from .passes import ONE_SEQUENCE, Pass

# Batched products of more multiplications than this are not probed, and not taken.
_PROBE_LIMIT = 1 << 31


def experts_of(w: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The matrices of the experts, [E, N, K], as a view of w [E N, K]."""
    return w.view(rows.experts, -1, w.shape[1])


def grouped_matmul_ref(x_RK: torch.Tensor, w_ENK: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    """Each row times the matrix of its expert, transposed. -> [R, N]. w may have any strides.

    One call of the library multiplies all experts where a probe finds that it gives every row the same bits.
    """
    if x_RK.dtype in THROUGH_FP32:  # as matmul_ref does, but once for all experts
        return grouped_matmul_ref(x_RK.float(), w_ENK.float(), rows).to(x_RK.dtype)
    if rows.equal and _is_aligned(x_RK, w_ENK):
        x = x_RK.view(rows.experts, -1, x_RK.shape[1])
        if _bmm_agrees(x.dtype, x.shape[1], *w_ENK.shape, w_ENK.stride(), torch.get_num_threads()):
            return torch.bmm(x, w_ENK.transpose(1, 2)).view(len(x_RK), -1)
    y = x_RK.new_zeros(x_RK.shape[0], w_ENK.shape[1])
    for expert, start, end in rows.segments:
        y[start:end] = matmul_ref(x_RK[start:end], w_ENK[expert])
    return y


def _is_aligned(x_RK: torch.Tensor, w_ENK: torch.Tensor) -> bool:
    """Whether matmul_ref would compute from these tensors themselves, without padding or a copy."""
    at_64_bytes = x_RK.data_ptr() % 64 == 0 and w_ENK.data_ptr() % 64 == 0
    return at_64_bytes and x_RK.is_contiguous() and not (w_ENK.shape[1] % ALIGN or w_ENK.shape[2] % ALIGN)


@cache
def _bmm_agrees(
    dtype: torch.dtype, rows: int, E: int, N: int, K: int, strides: tuple[int, ...], threads: int
) -> bool:
    """Whether a batched product gives each row the bits of matmul_ref. See matmul._agrees."""
    if E * rows * K * N > _PROBE_LIMIT:
        return False
    g = torch.Generator().manual_seed(0)
    x = torch.randn(E, rows, K, generator=g).to(dtype)
    w = torch.empty_strided((E, N, K), strides, dtype=dtype)
    w.copy_(torch.randn(E, N, K, generator=g))
    expected = torch.stack([matmul_ref(x_e, w_e) for x_e, w_e in zip(x, w, strict=True)])
    return equal(torch.bmm(x, w.transpose(1, 2)), expected)


def add_grouped_outer_ref(
    buffer: GradBuffer, dy_RN: torch.Tensor, x_RK: torch.Tensor, rows: ExpertRows, blocks: TokenBlocks
) -> None:
    """buffer [shards, E N, K] += dy^T x of each expert's rows, block by block in the order of `blocks`."""
    sums = buffer.zeroed(blocks.shards)
    dy, x = dy_RN.to(sums.dtype), x_RK.to(sums.dtype)
    for shard, by_expert in rows.blocks(blocks):
        acc = experts_of(sums[shard], rows)
        for expert, bounds in by_expert:
            add_outer_ref(acc[expert], dy, x, bounds)


def add_grouped_low_rank_ref(
    buffers: LowRankBuffers, dy_RN: torch.Tensor, x_RK: torch.Tensor, rows: ExpertRows, blocks: TokenBlocks
) -> None:
    """Add the gradients of the adapters of each expert that has rows, block by block as above."""
    x_of_all, width = x_RK.to(accumulate_dtype(x_RK.dtype)), dy_RN.shape[1]
    segments = {expert: (start, end) for expert, start, end in rows.segments}
    bounds = [(shard, dict(by_expert)) for shard, by_expert in rows.blocks(blocks)]
    for adapter in buffers.adapters:
        expert, first = divmod(adapter.rows.start, width)
        if expert not in segments:
            continue
        start, end = segments[expert]
        x, dy = x_of_all[start:end], dy_RN[start:end, first : first + len(adapter.b)]
        dy = dy.to(x.dtype).contiguous()
        x_a, dy_b = low_rank_rows(adapter, dy, x)
        for shard, of_expert in bounds:
            own = [(a - start, b - start) for a, b in of_expert[expert]]
            add_outer_ref(adapter.db.zeroed([shard])[shard], dy, x_a, own)
            add_outer_ref(adapter.da.zeroed([shard])[shard], dy_b, x, own)


def add_grouped(
    buffer: GradBuffer | LowRankBuffers,
    dy_RN: torch.Tensor,
    x_RK: torch.Tensor,
    rows: Rows,
    blocks: TokenBlocks,
) -> None:
    """Add the gradient of the experts' matrices, or of their adapters in its place."""
    is_low_rank = isinstance(buffer, LowRankBuffers)
    if not on_triton(x_RK):
        add = add_grouped_low_rank_ref if is_low_rank else add_grouped_outer_ref
    elif is_low_rank:
        from .grouped_low_rank_triton import add_grouped_low_rank as add
    else:
        from .grouped_linear_triton import add_grouped_outer as add
    add(buffer, dy_RN, x_RK, rows, blocks)


def _forward(x: torch.Tensor, w_ENK: torch.Tensor, rows: Rows) -> torch.Tensor:
    if not on_triton(x):
        return grouped_matmul_ref(x[rows.tokens], w_ENK, rows)
    from .grouped_linear_triton import grouped_matmul

    return grouped_matmul(x, w_ENK, rows, of_tokens=True)


def _dx(dy: torch.Tensor, w_ENK: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The gradient of x, [T, K]."""
    if not on_triton(dy):
        dx_rows = grouped_matmul_ref(dy, w_ENK.transpose(1, 2), rows)
        return rows.sum_slots(dx_rows.to(accumulate_dtype(dy.dtype))).to(dy.dtype)
    from .expert_rows_triton import sum_slots
    from .grouped_linear_triton import grouped_matmul

    return sum_slots(grouped_matmul(dy, w_ENK.transpose(1, 2), rows, of_tokens=False), rows)


def _rows_of(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """x of each row's token, [T, K] -> [R, K]."""
    if not on_triton(x):
        return x[rows.tokens]
    from .expert_rows_triton import rows_of_tokens

    return rows_of_tokens(x, rows)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, rows, in_pass):
        # w does not go through save_for_backward: its identity finds its buffer.
        ctx.save_for_backward(x)
        ctx.w, ctx.rows, ctx.in_pass = w, rows, in_pass
        return _forward(x, experts_of(w, rows), rows)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        w, rows, in_pass, dx, dw = ctx.w, ctx.rows, ctx.in_pass.over(x), None, None
        if ctx.needs_input_grad[0]:
            dx = _dx(dy, experts_of(w, rows), rows)
        if ctx.needs_input_grad[1]:
            buffer = in_pass.buffer(w)
            add_grouped(buffer, dy, _rows_of(x, rows), rows, in_pass.blocks)
            dw = in_pass.returned_grad(w, buffer)
        return dx, dw, None, None


def grouped_linear(
    x: torch.Tensor, w: torch.Tensor, rows: Rows, in_pass: Pass = ONE_SEQUENCE
) -> torch.Tensor:
    """The rows of x [T, K] by the matrices w [E N, K] of their experts -> [R, N], in the order of `rows`.

    in_pass: the token blocks are of the T tokens. Raises ValueError on a shape or dtype that does not fit.
    """
    check_dtype("grouped_linear", x=x, w=w)
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1] or w.shape[0] % rows.experts:
        raise ValueError(
            f"grouped_linear: x {tuple(x.shape)} must be [T, K], and w {tuple(w.shape)} [E N, K] of "
            f"{rows.experts} experts with the same K"
        )
    return _GroupedLinear.apply(x, w, rows, in_pass)
