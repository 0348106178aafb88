"""Linear projection of each token by the matrices of its experts.

    y_r = x_t w_e^T (+ b_e)     of a row r = (expert e, token t)
    dx_t = sum over the slots of t of dy_r w_e          dw_e = sum over the rows of e of dy_r^T x_t
    db_e = sum over the rows of e of dy_r

Shapes: x [T, K]; w [E N, K] holds the matrices [N, K] of the experts one after another; y [R, N]. T tokens,
R rows (expert_rows.py), E experts. Or w [E, K, N], each matrix transposed, as gpt-oss stores them, and with
it b [E, N].
Roundings: y is rounded once, after a bias was added. dy_r w_e is rounded once, then the slots are added in
fp32, slot after slot, and the sum is rounded once. dw is not rounded where the pass has fp32 buffers
(grad.py).
Order: no row knows another. On a GPU a row has the bits of `linear` with the matrix of its expert, and on a
CPU those of torch.mm (grouped_matmul_ref): the product of matmul.py takes two to four times as long for few
rows. dw_e is summed over the sequences of the pass, in their order. The rows of e in a sequence are cut into
token blocks of their own: a block of 128 tokens has few of them (8, if a token has 8 of 128 experts), and a
GPU multiplies tiles of 32 rows. Blocks that span sequences would depend on the micro-batch. The experts of
other tokens change nothing. db_e has the same blocks, each summed as in columns.py; on a GPU the sequences'
rows in tiles (expert_columns_triton.py).
The gradients of LoRA adapters of the experts' matrices (low_rank.py) have the same order. Where these are
not merged into w (linear.Adapted), a row of y, and dy_r w_e, are the fp32 sums above plus what the adapters
of the row's expert add, one more fp32 sum for each of its matrices, and are rounded once after it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import torch
import torch.nn.functional as F

from ..files.bitwise import equal
from .backend import on_triton
from .columns import add_columns_cpu
from .expert_rows import PADDED_ROWS, ExpertRows, Rows
from .grad import GradBuffer, accumulate_dtype, check_dtype
from .linear import Adapted
from .low_rank import LowRank, LowRankBuffers, by_matrix, low_rank_rows, stacked_factors
from .matmul import LONG_TILES, THROUGH_FP32, add_outer_ref, narrow, pad_width
from .order import ALIGN, ROW_TILE, TokenBlocks, blocks_of_shards
from .passes import ONE_SEQUENCE, Pass

# Products of more multiplications than this are not probed, and not taken.
_PROBE_LIMIT = 1 << 31


def experts_of(w: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The matrices of the experts, [E, N, K], as a view of w [E N, K] or [E, K, N]."""
    return w.transpose(1, 2) if w.dim() == 3 else w.view(rows.experts, -1, w.shape[1])


def check_experts(op: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, rows: Rows) -> None:
    """Raise ValueError for weights w and b that do not fit the rows of x [..., K]."""
    if w.dim() == 3 or b is not None:
        if w.dim() != 3 or w.shape[0] != rows.experts or x.dim() != 2 or x.shape[1] != w.shape[1]:
            raise ValueError(
                f"{op}: x {tuple(x.shape)} must be [., K], and w {tuple(w.shape)} [{rows.experts}, K, N]"
            )
        if b is not None and b.shape != (w.shape[0], w.shape[2]):
            raise ValueError(f"{op}: b {tuple(b.shape)} must be {(w.shape[0], w.shape[2])}, as w")
    elif x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1] or w.shape[0] % rows.experts:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} must be [., K], and w {tuple(w.shape)} [E N, K] of "
            f"{rows.experts} experts with the same K"
        )


def add_bias(y_RN: torch.Tensor, b: torch.Tensor | None, rows: ExpertRows) -> torch.Tensor:
    """y in the dtype of its sums, plus the bias of each row's expert, in place."""
    return y_RN if b is None else y_RN.add_(b.to(y_RN.dtype)[rows.expert_of_row])


def grouped_matmul_ref(x_RK: torch.Tensor, w_ENK: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    """Each row times the matrix of its expert, transposed. -> [R, N]. w may have any strides.

    The bits of a row are those of torch.mm of ROW_TILE rows by one thread. One call of the library multiplies
    all experts, or as many rows of one as there are, where a probe finds that every row has the same bits.
    """
    if x_RK.dtype in THROUGH_FP32:  # as matmul_ref does, but once for all experts
        return grouped_matmul_ref(x_RK.float(), w_ENK.float(), rows).to(x_RK.dtype)
    N, (x, w_EKN) = w_ENK.shape[1], _aligned(x_RK, w_ENK)
    shape = (x.dtype, *w_EKN.shape[1:], w_EKN.stride()[1:], torch.get_num_threads())
    if rows.equal and _bmm_agrees(len(x) // rows.experts, w_EKN.stride(0), rows.experts, *shape):
        return narrow(torch.bmm(x.view(rows.experts, -1, x.shape[1]), w_EKN).flatten(0, 1), N)
    y = x.new_zeros(len(x), w_EKN.shape[2])
    for expert, start, end in rows.segments:
        w_KN, tiles = w_EKN[expert], _tiles(end - start, *shape)
        if tiles is None:
            y[start:end] = _by_definition(x[start:end], w_KN)
            continue
        for a, b in tiles:
            torch.mm(x[start + a : start + b], w_KN, out=y[start + a : start + b])
    return narrow(y, N)


def _aligned(x_RK: torch.Tensor, w_ENK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the transposed w as the library is given them: widths and addresses as in matmul.py."""
    w_EKN, (_, N, K) = w_ENK.transpose(1, 2), w_ENK.shape
    if N % ALIGN or K % ALIGN:
        w_EKN = F.pad(w_EKN, (0, -N % ALIGN, 0, -K % ALIGN))
    elif w_EKN.data_ptr() % 64 or w_EKN.stride(0) * w_EKN.itemsize % 64:
        w_EKN = w_EKN.clone()
    return pad_width(x_RK), w_EKN


def _by_definition(x_RK: torch.Tensor, w_KN: torch.Tensor) -> torch.Tensor:
    """x w, tile by tile of ROW_TILE rows. -> [R, N]"""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tiles = F.pad(x_RK, (0, 0, 0, -len(x_RK) % ROW_TILE)).split(ROW_TILE)
        return torch.cat([torch.mm(tile, w_KN) for tile in tiles])[: len(x_RK)]
    finally:
        torch.set_num_threads(threads)


@cache
def _tiles(
    rows: int, dtype: torch.dtype, K: int, N: int, strides: tuple[int, int], threads: int
) -> list[tuple[int, int]] | None:
    """The rows [start, end) of each call for `rows` rows of an expert. None where no tiles agree."""
    tiles, start = [], 0
    for size in (*LONG_TILES, *range(2 * ROW_TILE - PADDED_ROWS, 0, -PADDED_ROWS)):
        while rows - start >= size and _mm_agrees(size, dtype, K, N, strides, threads):
            tiles.append((start, start + size))
            start += size
    return tiles if start == rows else None


@cache
def _mm_agrees(rows: int, dtype: torch.dtype, K: int, N: int, strides: tuple[int, int], threads: int) -> bool:
    """Whether a product of `rows` rows gives each row the bits of the definition. See matmul._agrees."""
    return _agrees(torch.mm, (rows,), (), dtype, K, N, strides)


@cache
def _bmm_agrees(
    rows: int,
    stride: int,
    E: int,
    dtype: torch.dtype,
    K: int,
    N: int,
    strides: tuple[int, int],
    threads: int,
) -> bool:
    """Whether a batched product of `rows` rows of each expert does. stride: from one expert to the next."""
    return _agrees(torch.bmm, (E, rows), (stride,), dtype, K, N, strides)


def _agrees(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    K: int,
    N: int,
    strides: tuple[int, int],
) -> bool:
    """Whether a call of the library gives every row of random numbers the bits of the definition."""
    if prod(rows) * K * N > _PROBE_LIMIT:
        return False
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, K, generator=g).to(dtype)
    w = torch.empty_strided((*rows[:-1], K, N), (*stride, *strides), dtype=dtype)
    w.copy_(torch.randn(w.shape, generator=g))
    experts = zip(x, w, strict=True) if len(rows) > 1 else [(x, w)]
    return equal(product(x, w).flatten(0, -2), torch.cat([_by_definition(x_e, w_e) for x_e, w_e in experts]))


def add_grouped_outer_ref(
    buffer: GradBuffer, dy_RN: torch.Tensor, x_RK: torch.Tensor, rows: ExpertRows, blocks: TokenBlocks
) -> None:
    """buffer [shards, E N, K] += dy^T x of each expert's rows, block by block in the order of `blocks`."""
    sums = buffer.zeroed(blocks.shards)
    dy, x = dy_RN.to(sums.dtype), x_RK.to(sums.dtype)
    is_transposed = sums.dim() == 4
    for shard, by_expert in rows.blocks(blocks):
        acc = sums[shard] if is_transposed else experts_of(sums[shard], rows)
        for expert, bounds in by_expert:
            add_outer_ref(acc[expert], *((x, dy) if is_transposed else (dy, x)), bounds)


def add_grouped_columns(buffer: GradBuffer, dy_RN: torch.Tensor, rows: Rows, blocks: TokenBlocks) -> None:
    """buffer [shards, E, N] += the column sums of each expert's rows, block by block as above."""
    if on_triton(dy_RN):
        from .expert_columns_triton import add_expert_columns

        return add_expert_columns(buffer, dy_RN, rows, blocks)
    sums = buffer.zeroed(blocks.shards)
    for shard, by_expert in rows.blocks(blocks):
        add_columns_cpu(sums[shard], dy_RN, blocks_of_shards(dict(by_expert)))


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
        for shard, by_expert in bounds:
            expert_runs = [(a - start, b - start) for a, b in by_expert[expert]]
            add_outer_ref(adapter.db.zeroed([shard])[shard], dy, x_a, expert_runs)
            add_outer_ref(adapter.da.zeroed([shard])[shard], dy_b, x, expert_runs)


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


def products(x_RK: torch.Tensor, w_ENK: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Each row times the matrix of its expert, transposed, as an fp32 sum (fp64 for fp64). -> [R, N]"""
    acc = accumulate_dtype(x_RK.dtype)
    if not on_triton(x_RK):
        return grouped_matmul_ref(x_RK.to(acc), w_ENK.to(acc), rows)
    from .grouped_linear_triton import grouped_matmul

    return grouped_matmul(x_RK, w_ENK, rows, x_of_tokens=False, dtype=acc)


def add_to_products(
    y_RN: torch.Tensor, x_RK: torch.Tensor, adapters: Sequence[LowRank], rows: Rows
) -> torch.Tensor:
    """y += (s x_r a_e^T) b_e^T, one matrix of the experts after another. y: see products."""
    x = x_RK.to(y_RN.dtype)
    for first, by_expert in by_matrix(adapters, y_RN.shape[1], rows.experts).items():
        b, a = stacked_factors(by_expert, y_RN.dtype)
        x_a = products(x, a, rows).mul_(by_expert[0].scale)
        y_RN[:, first : first + b.shape[1]] += products(x_a, b, rows)
    return y_RN


def add_to_input_products(
    dx_RK: torch.Tensor, dy_RN: torch.Tensor, adapters: Sequence[LowRank], rows: Rows
) -> torch.Tensor:
    """dx += (s dy_r b_e) a_e, one matrix of the experts after another. dx: see products."""
    for first, by_expert in by_matrix(adapters, dy_RN.shape[1], rows.experts).items():
        b, a = stacked_factors(by_expert, dx_RK.dtype)
        dy = dy_RN[:, first : first + b.shape[1]].to(dx_RK.dtype).contiguous()
        dy_b = products(dy, b.transpose(1, 2), rows).mul_(by_expert[0].scale)
        dx_RK += products(dy_b, a.transpose(1, 2), rows)
    return dx_RK


def with_adapters(weight: torch.Tensor | Adapted) -> tuple[torch.Tensor, tuple[LowRank, ...]]:
    """A weight, and the adapters that are not merged into it."""
    return weight if isinstance(weight, Adapted) else (weight, ())


def _forward(
    x: torch.Tensor, w_ENK: torch.Tensor, adapters: Sequence[LowRank], b: torch.Tensor | None, rows: Rows
) -> torch.Tensor:
    if adapters:
        x = _rows_of(x, rows)
        return add_to_products(products(x, w_ENK, rows), x, adapters, rows).to(x.dtype)
    if on_triton(x):
        from .grouped_linear_triton import grouped_matmul

        return grouped_matmul(x, w_ENK, rows, x_of_tokens=True, b=b)
    if b is not None:
        acc = accumulate_dtype(x.dtype)
        y = grouped_matmul_ref(x[rows.tokens].to(acc), w_ENK.to(acc), rows)
        return add_bias(y, b, rows).to(x.dtype)
    return grouped_matmul_ref(x[rows.tokens], w_ENK, rows)


def _dx(dy: torch.Tensor, w_ENK: torch.Tensor, adapters: Sequence[LowRank], rows: Rows) -> torch.Tensor:
    """The gradient of x, [T, K]."""
    w_EKN = w_ENK.transpose(1, 2)
    if adapters:
        dx_rows = add_to_input_products(products(dy, w_EKN, rows), dy, adapters, rows).to(dy.dtype)
    elif not on_triton(dy):
        dx_rows = grouped_matmul_ref(dy, w_EKN, rows)
    else:
        from .grouped_linear_triton import grouped_matmul

        dx_rows = grouped_matmul(dy, w_EKN, rows, x_of_tokens=False)
    if not on_triton(dy):
        return rows.sum_slots(dx_rows.to(accumulate_dtype(dy.dtype))).to(dy.dtype)
    from .expert_rows_triton import sum_slots

    return sum_slots(dx_rows, rows)


def _rows_of(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """x of each row's token, [T, K] -> [R, K]."""
    if not on_triton(x):
        return x[rows.tokens]
    from .expert_rows_triton import rows_of_tokens

    return rows_of_tokens(x, rows)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, adapters, b, rows, in_pass):
        # w and b do not go through save_for_backward: their identity finds their buffers.
        ctx.save_for_backward(x)
        ctx.w, ctx.adapters, ctx.b, ctx.rows, ctx.in_pass = w, adapters, b, rows, in_pass
        return _forward(x, experts_of(w, rows), adapters, b, rows)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        w, b, rows, in_pass, dx, dw, db = ctx.w, ctx.b, ctx.rows, ctx.in_pass.over(x), None, None, None
        if ctx.needs_input_grad[0]:
            dx = _dx(dy, experts_of(w, rows), ctx.adapters, rows)
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(w, ctx.adapters, dy, _rows_of(x, rows), rows, in_pass)
        if b is not None and ctx.needs_input_grad[3]:
            db = bias_gradient(b, dy, rows, in_pass)
        return dx, dw, None, db, None, None


def weight_gradient(
    w: torch.Tensor,
    adapters: Sequence[LowRank],
    dy_RN: torch.Tensor,
    x_RK: torch.Tensor,
    rows: Rows,
    in_pass: Pass,
) -> torch.Tensor | None:
    """What a backward returns for the weight w of the rows' experts (Pass.returned_grad).

    An adapted weight has no gradient, and its adapters have theirs where the pass has buffers for them.
    """
    buffer = in_pass.buffer(w)
    if adapters and not isinstance(buffer, LowRankBuffers):
        return None
    add_grouped(buffer, dy_RN, x_RK, rows, in_pass.blocks)
    return in_pass.returned_grad(w, buffer)


def bias_gradient(b: torch.Tensor, dy_RN: torch.Tensor, rows: Rows, in_pass: Pass) -> torch.Tensor | None:
    """What a backward returns for the bias b [E, N] of the rows' experts (Pass.returned_grad)."""
    buffer = in_pass.buffer(b)
    add_grouped_columns(buffer, dy_RN, rows, in_pass.blocks)
    return in_pass.returned_grad(b, buffer)


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Adapted,
    rows: Rows,
    in_pass: Pass = ONE_SEQUENCE,
    b: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows of x [T, K] by the matrices w of their experts -> [R, N], in the order of `rows`.

    weight w [E N, K] or [E, K, N], and b [E, N] with the latter. Only the former can have adapters, and then
    each expert has them. in_pass: the token blocks are of the T tokens. Raises ValueError on a shape or dtype
    that does not fit.
    """
    w, adapters = with_adapters(weight)
    check_dtype("grouped_linear", x=x, w=w, **({} if b is None else {"b": b}))
    check_experts("grouped_linear", x, w, b, rows)
    return _GroupedLinear.apply(x, w, adapters, b, rows, in_pass)
