"""Triton kernels of causal_conv.py. A program has some channels of a tile of tokens.

Shapes: x, y, dy, dx [T, C]; w [C, 1, TAPS]; conv [slots, TAPS - 1, C]; dp [T, C] in fp32; partial sums of dw
[runs, C TAPS] in fp32 (columns_triton.py). Tables: recurrent_state.SegmentTables.
Roundings: y and dx once each.
Order: four products, added from the oldest on. A run's contributions to dw are added row after row.
"""

import torch
import triton
import triton.language as tl

from .columns_triton import NORM_ROWS
from .exp_triton import sigmoid, silu
from .launch import ceil_div, dense, launch
from .order import TokenBlocks
from .recurrent_state import TAPS, RecurrentState, SegmentTables

# Tokens and channels of a program. They decide no bit.
ROWS, COLUMNS, WARPS = 16, 64, 4


@triton.jit
def _tap(x_ptr, conv_ptr, token, place, slot, back, in_call, column, C, TAPS: tl.constexpr):
    """The inputs `back` tokens before, in fp32: from the call, from the slot, or 0 before a sequence."""
    is_new = (in_call & (place >= back))[:, None] & (column < C)
    is_old = (in_call & (place < back) & (slot >= 0))[:, None] & (column < C)
    x = tl.load(x_ptr + (token - back).to(tl.int64)[:, None] * C + column, mask=is_new, other=0.0)
    before = (slot.to(tl.int64) * (TAPS - 1) + (TAPS - 1) + place - back)[:, None] * C + column
    return tl.load(conv_ptr + before, mask=is_old, other=x).to(tl.float32)


@triton.jit
def _convolved(x_ptr, conv_ptr, w_ptr, token, place, slot, in_call, column, C, TAPS: tl.constexpr):
    """p of each token and channel."""
    w = w_ptr + column * TAPS
    total = _tap(x_ptr, conv_ptr, token, place, slot, TAPS - 1, in_call, column, C, TAPS)
    total = total * tl.load(w, mask=column < C, other=0.0).to(tl.float32)
    for j in tl.static_range(1, TAPS):
        x = _tap(x_ptr, conv_ptr, token, place, slot, TAPS - 1 - j, in_call, column, C, TAPS)
        total += x * tl.load(w + j, mask=column < C, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["T", "continued"])
def _causal_conv_fwd(
    x_ptr,
    conv_ptr,
    w_ptr,
    y_ptr,
    sequences_ptr,
    tokens_ptr,
    T,
    continued,
    C,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_call = token < T
    place = tl.load(tokens_ptr + 2 * token, mask=in_call, other=0)
    s = tl.load(tokens_ptr + 2 * token + 1, mask=in_call, other=0)
    slot = tl.load(sequences_ptr + 5 * s + 4)
    slot = tl.where(continued != 0, slot, -1)
    p = _convolved(x_ptr, conv_ptr, w_ptr, token, place, slot, in_call, column, C, TAPS)
    mask = in_call[:, None] & (column < C)
    y = silu(p).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token.to(tl.int64)[:, None] * C + column, y, mask=mask)


@triton.jit
def _keep_inputs(
    x_ptr,
    conv_ptr,
    sequences_ptr,
    C,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Each slot's last inputs. TAPS rows are read, of which the first is not kept."""
    s = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    start, length = tl.load(sequences_ptr + 5 * s), tl.load(sequences_ptr + 5 * s + 1)
    slot, i = tl.load(sequences_ptr + 5 * s + 4).to(tl.int64), tl.arange(0, TAPS) - 1
    place = length - (TAPS - 1) + i
    kept = (i >= 0)[:, None] & (column < C)
    x = tl.load(
        x_ptr + (start + place).to(tl.int64)[:, None] * C + column,
        mask=kept & (place >= 0)[:, None],
        other=0.0,
    )
    before = (slot * (TAPS - 1) + (TAPS - 1) + place)[:, None] * C + column
    x = tl.load(conv_ptr + before, mask=kept & (place < 0)[:, None], other=x)
    tl.debug_barrier()  # all threads have read before one writes
    tl.store(conv_ptr + (slot * (TAPS - 1) + i)[:, None] * C + column, x, mask=kept)


@triton.jit(do_not_specialize=["T"])
def _causal_conv_dp(
    dy_ptr,
    x_ptr,
    w_ptr,
    dp_ptr,
    tokens_ptr,
    T,
    C,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_call = token < T
    place = tl.load(tokens_ptr + 2 * token, mask=in_call, other=0)
    p = _convolved(x_ptr, x_ptr, w_ptr, token, place, place * 0 - 1, in_call, column, C, TAPS)
    s, mask = sigmoid(p), in_call[:, None] & (column < C)
    row = token.to(tl.int64)[:, None] * C + column
    dy = tl.load(dy_ptr + row, mask=mask, other=0.0).to(tl.float32)
    tl.store(dp_ptr + row, dy * (s * (1.0 + p * (1.0 - s))), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _causal_conv_dx(
    dp_ptr,
    w_ptr,
    dx_ptr,
    tokens_ptr,
    T,
    C,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    place = tl.load(tokens_ptr + 2 * token, mask=token < T, other=0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for j in tl.static_range(TAPS):
        reader = token + (TAPS - 1 - j)
        reads = (reader < T) & (
            tl.load(tokens_ptr + 2 * reader, mask=reader < T, other=-1) == place + TAPS - 1 - j
        )
        dp = tl.load(
            dp_ptr + reader.to(tl.int64)[:, None] * C + column, mask=reads[:, None] & (column < C), other=0.0
        )
        total += dp * tl.load(w_ptr + column * TAPS + j, mask=column < C, other=0.0).to(tl.float32)
    mask = (token < T)[:, None] & (column < C)
    tl.store(dx_ptr + token.to(tl.int64)[:, None] * C + column, total.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _causal_conv_dw(
    dp_ptr,
    x_ptr,
    partial_ptr,
    tokens_ptr,
    table_ptr,
    C,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
):
    run = tl.program_id(0)
    start, end = tl.load(table_ptr + 2 * run), tl.load(table_ptr + 2 * run + 1)
    column, tap = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None], tl.arange(0, TAPS)[None, :]
    total = tl.zeros([COLUMNS, TAPS], tl.float32)
    for i in range(0, ROWS):
        token, back = start + i, TAPS - 1 - tap
        place = tl.load(tokens_ptr + 2 * token, mask=token < end, other=-1)
        in_run = column < tl.where(token < end, C, 0)
        dp = tl.load(dp_ptr + token.to(tl.int64) * C + column, mask=in_run, other=0.0)
        x = tl.load(
            x_ptr + (token - back).to(tl.int64) * C + column, mask=in_run & (place >= back), other=0.0
        )
        total += dp * x.to(tl.float32)
    tl.store(partial_ptr + run.to(tl.int64) * C * TAPS + column * TAPS + tap, total, mask=column < C)


def _grid(rows: int, C: int) -> tuple[int, int]:
    return ceil_div(rows, ROWS), ceil_div(C, COLUMNS)


def causal_conv_fwd(
    x: torch.Tensor, w: torch.Tensor, tables: SegmentTables, state: RecurrentState | None = None
) -> torch.Tensor:
    """y [T, C]. state: where the sequences have their slots, which then hold their last inputs."""
    x, w, (T, C) = dense(x), dense(w), x.shape
    y, conv = torch.empty_like(x), x if state is None else state.tensors["conv"]
    launch(
        _causal_conv_fwd,
        _grid(T, C),
        x,
        conv,
        w,
        y,
        tables.sequences,
        tables.tokens,
        T,
        int(state is not None),
        C,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        TAPS=TAPS,
        num_warps=WARPS,
    )
    if state is not None:
        launch(
            _keep_inputs,
            (len(tables.sequences), ceil_div(C, COLUMNS)),
            x,
            conv,
            tables.sequences,
            C,
            COLUMNS=COLUMNS,
            TAPS=TAPS,
            num_warps=WARPS,
        )
    return y


def causal_conv_bwd(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, tables: SegmentTables, blocks: TokenBlocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx [T, C] of whole sequences, and the sums of dw over each run of NORM_ROWS tokens, [runs, C TAPS]."""
    dy, x, w, (T, C) = dense(dy), dense(x), dense(w), x.shape
    dp, dx = torch.empty(T, C, dtype=torch.float32, device=x.device), torch.empty_like(x)
    sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS, "TAPS": TAPS, "num_warps": WARPS}
    launch(_causal_conv_dp, _grid(T, C), dy, x, w, dp, tables.tokens, T, C, **sizes)
    launch(_causal_conv_dx, _grid(T, C), dp, w, dx, tables.tokens, T, C, **sizes)
    table = blocks.on(x.device).pieces(NORM_ROWS)
    partial = torch.empty(len(table), C * TAPS, dtype=torch.float32, device=x.device)
    sizes["ROWS"] = NORM_ROWS
    grid = len(table), ceil_div(C, COLUMNS)
    launch(_causal_conv_dw, grid, dp, x, partial, tables.tokens, table, C, **sizes)
    return dx, partial
