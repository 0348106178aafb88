"""Triton kernels around the delta rule: the rows that it reads, what slots keep, and gradients of inputs.

_delta_rows brings the rows of each chunk together, from the call and from the slots: unit queries and keys,
beta, and the sums G of log-decays. _keep_rows leaves the rows of the open chunk in its slot, as they came.
_delta_inputs_bwd goes back from unit queries and keys to those of the convolution.

Shapes: W = CHUNK rows for each chunk of a SegmentTables; q, k [Hk, W, K]; g, beta, G [H, W]; others as in
delta_rule.py and recurrent_state.py. A row without a token is 0.
Roundings: G is in fp64, all else in fp32; the gradient of q and k once, after the sum over value heads.
Order: a row's sum is one of its power of two of columns. G is a scan of a whole chunk. The value heads of a
key head are added in ascending order.
"""

import torch
import triton
import triton.language as tl

from .exp_triton import expf, sigmoid
from .launch import ceil_div, dense, launch, next_power_of_2
from .recurrent_state import CHUNK, TILE, RecurrentState, SegmentTables, StateShape

EPS = 1e-6  # of unit vectors
# Warps of a program. They order the sum along a row.
WARPS = 4


@triton.jit
def place_rows(sequences_ptr, s, rows):
    """The call's token of each row, counted from the sequence's open chunk on; whether it is new, and old."""
    start = tl.load(sequences_ptr + 5 * s)
    length, opened = tl.load(sequences_ptr + 5 * s + 1), tl.load(sequences_ptr + 5 * s + 2)
    place = rows - opened
    return (start + place).to(tl.int64), (place >= 0) & (place < length), (rows >= 0) & (place < 0)


@triton.jit
def softplus(x):
    """log(1 + e^x), also where e^x is small: see delta_rule.py."""
    e = expf(-tl.abs(x))
    y = e + 1.0
    lost = y == 1.0
    small = tl.where(lost, e, tl.log(y) * tl.div_rn(e, tl.where(lost, 1.0, y - 1.0)))
    return tl.where(x > 0.0, x, 0.0) + small


@triton.jit
def _inverse_norm(x, EPS: tl.constexpr):
    """1 / |x| of each row, [R, 1]."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=1) + EPS))[:, None]


@triton.jit(do_not_specialize=["W"])
def _delta_rows(
    # pointers
    qkv_ptr,
    a_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    kv_ptr,
    old_g_ptr,
    old_beta_ptr,
    sequences_ptr,
    chunks_ptr,
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    G_ptr,
    # sizes
    W,
    H,
    group,
    K,
    C,
    kept,
    scale,
    # constants
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk, h = tl.program_id(0), tl.program_id(1)
    s = tl.load(chunks_ptr + chunk)
    local = chunk - tl.load(sequences_ptr + 5 * s + 3)
    slot = tl.load(sequences_ptr + 5 * s + 4).to(tl.int64)
    i = tl.arange(0, CHUNK)
    token, new, old = place_rows(sequences_ptr, s, local * CHUNK + i)
    x = tl.load(a_ptr + token * H + h, mask=new, other=0.0).to(tl.float32)
    x += tl.load(dt_bias_ptr + h).to(tl.float32)
    g = -softplus(x) * expf(tl.load(A_log_ptr + h).to(tl.float32) + tl.zeros([CHUNK], tl.float32))
    beta = sigmoid(tl.load(b_ptr + token * H + h, mask=new, other=0.0).to(tl.float32))
    before = (slot * CHUNK + i) * H + h
    g = tl.where(new, g, tl.load(old_g_ptr + before, mask=old, other=0.0))
    beta = tl.where(new, beta, tl.load(old_beta_ptr + before, mask=old, other=0.0))
    row = h.to(tl.int64) * W + chunk * CHUNK + i
    tl.store(g_ptr + row, g)
    tl.store(beta_ptr + row, beta)
    tl.store(G_ptr + row, tl.cumsum(g.to(tl.float64), 0))
    if h % group == 0:
        head, key = h // group, tl.arange(0, WIDTH)[None, :]
        keys = H // group * K
        for tile in range(0, CHUNK, TILE):
            t = tile + tl.arange(0, TILE)
            tokens, is_new, is_old = place_rows(sequences_ptr, s, local * CHUNK + t)
            new_k, old_k = is_new[:, None] & (key < K), is_old[:, None] & (key < K)
            source = qkv_ptr + tokens[:, None] * C + head * K + key
            q = tl.load(source, mask=new_k, other=0.0).to(tl.float32)
            k = tl.load(source + keys, mask=new_k, other=0.0)
            open_row = (slot * CHUNK + t)[:, None] * kept + head * K + key
            k = tl.load(kv_ptr + open_row, mask=old_k, other=k).to(tl.float32)
            rows = (head.to(tl.int64) * W + chunk * CHUNK + t)[:, None] * K + key
            tl.store(q_ptr + rows, q * _inverse_norm(q, EPS) * scale, mask=key < K)
            tl.store(k_ptr + rows, k * _inverse_norm(k, EPS), mask=key < K)


@triton.jit(do_not_specialize=["W"])
def _keep_rows(
    # pointers
    qkv_ptr,
    g_ptr,
    beta_ptr,
    sequences_ptr,
    kv_ptr,
    old_g_ptr,
    old_beta_ptr,
    # sizes
    W,
    H,
    C,
    kept,
    # constants
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    s, part = tl.program_id(0), tl.program_id(1)
    end = tl.load(sequences_ptr + 5 * s + 1) + tl.load(sequences_ptr + 5 * s + 2)
    first, slot = tl.load(sequences_ptr + 5 * s + 3), tl.load(sequences_ptr + 5 * s + 4).to(tl.int64)
    local, i = end // CHUNK, tl.arange(0, CHUNK)
    token, new, _ = place_rows(sequences_ptr, s, local * CHUNK + i)
    into = slot * CHUNK + i
    column = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = new[:, None] & (column < kept)
    x = tl.load(qkv_ptr + token[:, None] * C + (C - kept) + column, mask=mask, other=0.0)
    tl.store(kv_ptr + into[:, None] * kept + column, x, mask=mask)
    if part < H:
        row = part.to(tl.int64) * W + (first + local) * CHUNK + i
        tl.store(old_g_ptr + into * H + part, tl.load(g_ptr + row, mask=new, other=0.0), mask=new)
        tl.store(old_beta_ptr + into * H + part, tl.load(beta_ptr + row, mask=new, other=0.0), mask=new)


@triton.jit(do_not_specialize=["W"])
def _delta_inputs_bwd(
    # pointers
    dq_ptr,
    dk_ptr,
    qkv_ptr,
    dqkv_ptr,
    sequences_ptr,
    chunks_ptr,
    # sizes
    W,
    group,
    K,
    C,
    keys,
    scale,
    # constants
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    rows, head = tl.program_id(0) * TILE, tl.program_id(1)
    chunk = rows // CHUNK
    s = tl.load(chunks_ptr + chunk)
    local = chunk - tl.load(sequences_ptr + 5 * s + 3)
    i, key = tl.arange(0, TILE), tl.arange(0, WIDTH)[None, :]
    token, new, _ = place_rows(sequences_ptr, s, local * CHUNK + rows % CHUNK + i)
    mask = new[:, None] & (key < K)
    for is_key in tl.static_range(2):
        total = tl.zeros([TILE, WIDTH], tl.float32)
        for j in range(group):
            row = ((head.to(tl.int64) * group + j) * W + rows + i)[:, None] * K + key
            total += tl.load((dk_ptr if is_key else dq_ptr) + row, mask=mask, other=0.0)
        if not is_key:
            total = total * scale
        place = token[:, None] * C + is_key * keys + head * K + key
        x = tl.load(qkv_ptr + place, mask=mask, other=0.0).to(tl.float32)
        r = _inverse_norm(x, EPS)
        y = x * r
        dx = (total - y * tl.sum(total * y, axis=1)[:, None]) * r
        tl.store(dqkv_ptr + place, dx.to(dqkv_ptr.dtype.element_ty), mask=mask)


class PreparedRows:
    """The rows of all chunks, as the kernels read them: q, k [Hk, W, K]; g, beta, G [H, W]."""

    def __init__(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        tables: SegmentTables,
        shape: StateShape,
        state: RecurrentState | None = None,
    ):
        """state: where sequences that go on have their slots; None where all are whole."""
        self.qkv, self.tables, self.shape = dense(qkv), tables, shape
        W, (Hk, H, K, _), device = len(tables.chunks) * CHUNK, shape, qkv.device
        self.q, self.k = (torch.empty(Hk, W, K, dtype=torch.float32, device=device) for _ in range(2))
        self.g, self.beta = (torch.empty(H, W, dtype=torch.float32, device=device) for _ in range(2))
        self.G = torch.empty(H, W, dtype=torch.float64, device=device)
        # Without slots no row is old, so nothing is read there.
        self.kv, self.old_g, self.old_beta = (
            (self.qkv, self.g, self.beta)
            if state is None
            else (state.tensors[name] for name in ("kv", "g", "beta"))
        )
        launch(
            _delta_rows,
            (len(tables.chunks), H),
            self.qkv,
            dense(a),
            dense(b),
            dense(A_log),
            dense(dt_bias),
            self.kv,
            self.old_g,
            self.old_beta,
            *tables[:2],
            self.q,
            self.k,
            self.g,
            self.beta,
            self.G,
            W,
            H,
            H // Hk,
            K,
            shape.channels,
            sum(shape.widths[1:]),
            K**-0.5,
            EPS=EPS,
            WIDTH=next_power_of_2(K),
            CHUNK=CHUNK,
            TILE=TILE,
            num_warps=WARPS,
        )

    @property
    def rows(self) -> int:
        """W."""
        return self.k.shape[1]

    def keep(self) -> None:
        """Leave the rows of the open chunks in their slots."""
        kept, columns = sum(self.shape.widths[1:]), 32
        launch(
            _keep_rows,
            (len(self.tables.sequences), max(ceil_div(kept, columns), self.shape.heads)),
            self.qkv,
            self.g,
            self.beta,
            self.tables.sequences,
            self.kv,
            self.old_g,
            self.old_beta,
            self.rows,
            self.shape.heads,
            self.shape.channels,
            kept,
            COLUMNS=columns,
            CHUNK=CHUNK,
            num_warps=WARPS,
        )

    def inputs_bwd(self, dq: torch.Tensor, dk: torch.Tensor, dqkv: torch.Tensor) -> None:
        """Write the gradients of queries and keys to dqkv [T, C]. dq, dk [H, W, K]: of each value head."""
        (Hk, H, K, _) = self.shape
        launch(
            _delta_inputs_bwd,
            (self.rows // TILE, Hk),
            dq,
            dk,
            self.qkv,
            dqkv,
            *self.tables[:2],
            self.rows,
            H // Hk,
            K,
            self.shape.channels,
            Hk * K,
            K**-0.5,
            EPS=EPS,
            WIDTH=next_power_of_2(K),
            CHUNK=CHUNK,
            TILE=TILE,
            num_warps=WARPS,
        )
