"""Triton kernels of the delta rule's forward: for whole sequences, for a prefill in parts and for a decode.

_delta_pairs gives what the tokens of a chunk are to each other, tile by tile. In _delta_walk a program has
some columns of the values of one head, and walks the tiles of a sequence in ascending order. The state and
the u of the open chunk lie in memory, where later calls find them.

    B = (k k^T) D below the diagonal, A = beta B,  M = (q k^T) D,  T_II = (1 + A_II)^-1
    u_I = T_II (r_I - sum over J < I of A_IJ u_J),  o_I = e^G q_I S + sum over J <= I of M_IJ u_J

Shapes: as in delta_rows_triton.py; B, M [H, W, CHUNK]; T [H, W, TILE]; u [slots, CHUNK, H, V]; S [slots, H,
K, V]; o [T, H, V]. Tiles without a new token are not written.
Roundings: o once. Differences of G are in fp64.
Order: every product has TILE rows. Along K and V it runs in ascending parts of PART. Tiles are added in
ascending order. The inverse is by substitution, row after row. So a row has the same bits, wherever a call
begins. On a GPU these are not the bits of a CPU.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .delta_rows_triton import WARPS, PreparedRows, place_rows
from .exp_triton import expf
from .launch import ceil_div, launch, next_power_of_2
from .recurrent_state import CHUNK, TILE

# Elements of K or V of one product. With more, registers spill.
PART = 16
# Columns of the values of a program of the walk. They decide no bit of a sum.
COLUMNS = 32
# Warps of pairs, which are small.
PAIR_WARPS = 2


@triton.jit
def live_tiles(sequences_ptr, s, TILE: tl.constexpr):
    """The first and the end of the tiles that have new tokens, counted from the open chunk on."""
    length, opened = tl.load(sequences_ptr + 5 * s + 1), tl.load(sequences_ptr + 5 * s + 2)
    return opened // TILE, (opened + length + TILE - 1) // TILE


@triton.jit
def _unit_lower_inverse(A, TILE: tl.constexpr):
    """(1 + A)^-1 of A [TILE, TILE], which is 0 on and above the diagonal."""
    i, j = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0)
    for row in range(1, TILE):
        a = tl.sum(tl.where(i == row, A, 0.0), axis=0)  # the row's numbers, and zeros
        below = tl.sum(tl.where(i == j, a[None, :], 0.0), axis=1)[:, None] * inverse
        inverse = tl.where(i == row, inverse - tl.sum(below, axis=0)[None, :], inverse)
    return inverse


@triton.jit(do_not_specialize=["W"])
def _delta_pairs(
    # pointers
    q_ptr,
    k_ptr,
    beta_ptr,
    G_ptr,
    sequences_ptr,
    chunks_ptr,
    B_ptr,
    M_ptr,
    T_ptr,
    # sizes
    W,
    group,
    K,
    # constants
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    tile, h = tl.program_id(0), tl.program_id(1)
    chunk, p = tile * TILE // CHUNK, tile % (CHUNK // TILE)
    s = tl.load(chunks_ptr + chunk)
    first, end = live_tiles(sequences_ptr, s, TILE)
    walked = (chunk - tl.load(sequences_ptr + 5 * s + 3)) * (CHUNK // TILE) + p
    if walked >= first and walked < end:
        t, key = tl.arange(0, TILE), tl.arange(0, PART)
        head, head_of_key = h.to(tl.int64) * W, (h // group).to(tl.int64) * W
        row = tile * TILE + t
        G, beta = tl.load(G_ptr + head + row), tl.load(beta_ptr + head + row)[:, None]
        for J in range(p + 1):
            other = chunk * CHUNK + J * TILE + t
            kk, qk = tl.zeros([TILE, TILE], tl.float32), tl.zeros([TILE, TILE], tl.float32)
            for part in range(0, K, PART):
                column = part + key[None, :]
                queries, keys = (head_of_key + row)[:, None] * K, (head_of_key + other)[:, None] * K
                q = tl.load(q_ptr + queries + column, mask=column < K, other=0.0)
                k = tl.load(k_ptr + queries + column, mask=column < K, other=0.0)
                k_J = tl.trans(tl.load(k_ptr + keys + column, mask=column < K, other=0.0))
                kk = tl.dot(k, k_J, kk, input_precision="ieee")
                qk = tl.dot(q, k_J, qk, input_precision="ieee")
            # Above the diagonal the difference is positive and may overflow, so it is masked before.
            is_past = row[:, None] >= other[None, :]
            D = (G[:, None] - tl.load(G_ptr + head + other)[None, :]).to(tl.float32)
            D = expf(tl.where(is_past, D, -float("inf")))
            B = tl.where(row[:, None] > other[None, :], kk * D, 0.0)
            place = (head + row)[:, None] * CHUNK + (J * TILE + t)[None, :]
            tl.store(B_ptr + place, B)
            tl.store(M_ptr + place, qk * D)
            if p == J:
                inverse = _unit_lower_inverse(B * beta, TILE)
                tl.store(T_ptr + (head + row)[:, None] * TILE + t[None, :], inverse)


@triton.jit(do_not_specialize=["W", "step"])
def _delta_walk(
    # pointers
    q_ptr,
    k_ptr,
    qkv_ptr,
    kv_ptr,
    beta_ptr,
    G_ptr,
    B_ptr,
    M_ptr,
    T_ptr,
    sequences_ptr,
    u_ptr,
    S_ptr,
    o_ptr,
    # sizes
    W,
    step,
    H,
    group,
    K,
    V,
    C,
    kept,
    # constants
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    TILES: tl.constexpr = CHUNK // TILE
    s, h, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, key = tl.arange(0, TILE), tl.arange(0, PART)
    column = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_v = column < V
    length, opened = tl.load(sequences_ptr + 5 * s + 1), tl.load(sequences_ptr + 5 * s + 2)
    chunks = tl.load(sequences_ptr + 5 * s + 3)
    # A walk that keeps all states has a place for each chunk; another one keeps the last, in the slot.
    slot = (chunks if step else tl.load(sequences_ptr + 5 * s + 4)).to(tl.int64)
    first, end = live_tiles(sequences_ptr, s, TILE)
    head, head_of_key = h.to(tl.int64) * W, (h // group).to(tl.int64) * W
    value = h * V + column
    for tile in range(first, end):
        p, local = tile % TILES, tile // TILES
        row = chunks * CHUNK + tile * TILE + t
        token, new, old = place_rows(sequences_ptr, s, tile * TILE + t)
        old_row = (slot * CHUNK + tile * TILE + t)[:, None] * kept + (kept - H * V)
        is_new, is_old = new[:, None] & in_v, old[:, None] & in_v
        v = tl.load(qkv_ptr + token[:, None] * C + (C - H * V) + value, mask=is_new, other=0.0)
        v = tl.load(kv_ptr + old_row + value, mask=is_old, other=v).to(tl.float32)
        S_place = S_ptr + ((slot + step * local) * H + h) * K * V
        u_place = u_ptr + (slot + step * local) * CHUNK * H * V + value
        kS, qS = tl.zeros([TILE, COLUMNS], tl.float32), tl.zeros([TILE, COLUMNS], tl.float32)
        for part in range(0, K, PART):
            at_k = (part + key)[:, None]
            S = tl.load(S_place + at_k * V + column, mask=(at_k < K) & in_v, other=0.0)
            place, in_k = (head_of_key + row)[:, None] * K + (part + key)[None, :], (part + key)[None, :] < K
            kS = tl.dot(tl.load(k_ptr + place, mask=in_k, other=0.0), S, kS, input_precision="ieee")
            qS = tl.dot(tl.load(q_ptr + place, mask=in_k, other=0.0), S, qS, input_precision="ieee")
        G, beta = tl.load(G_ptr + head + row), tl.load(beta_ptr + head + row)[:, None]
        eG = expf(G.to(tl.float32))[:, None]
        passed, seen = tl.zeros([TILE, COLUMNS], tl.float32), tl.zeros([TILE, COLUMNS], tl.float32)
        pairs = (head + row)[:, None] * CHUNK
        for J in range(p):
            u = tl.load(u_place + (J * TILE + t)[:, None] * H * V, mask=in_v, other=0.0)
            place = pairs + (J * TILE + t)[None, :]
            passed = tl.dot(tl.load(B_ptr + place) * beta, u, passed, input_precision="ieee")
            seen = tl.dot(tl.load(M_ptr + place), u, seen, input_precision="ieee")
        r = (v - kS * eG) * beta - passed
        T = tl.load(T_ptr + (head + row)[:, None] * TILE + t[None, :])
        u = tl.dot(T, r, input_precision="ieee")
        seen = tl.dot(tl.load(M_ptr + pairs + (p * TILE + t)[None, :]), u, seen, input_precision="ieee")
        o = (qS * eG + seen).to(o_ptr.dtype.element_ty)
        tl.store(o_ptr + token[:, None] * H * V + value, o, mask=is_new)
        tl.store(u_place + (p * TILE + t)[:, None] * H * V, u, mask=in_v)
        tl.debug_barrier()  # other threads of the program read u, and have read S
        full, is_next_kept = (local + 1) * CHUNK <= opened + length, (step == 0) | (tile + 1 < end)
        if (p == TILES - 1) & full & is_next_kept:
            begin = head + chunks * CHUNK + local * CHUNK
            G_end = tl.load(G_ptr + begin + CHUNK - 1)
            fading = expf(tl.zeros([1, 1], tl.float32) + G_end.to(tl.float32))
            for part in range(0, K, PART):
                at_k = (part + key)[:, None]
                total = tl.zeros([PART, COLUMNS], tl.float32)
                for J in range(p + 1):
                    other = J * TILE + t
                    left = expf((G_end - tl.load(G_ptr + begin + other)).to(tl.float32))
                    k_row = head_of_key + chunks * CHUNK + local * CHUNK + other
                    k = tl.load(k_ptr + k_row[None, :] * K + at_k, mask=at_k < K, other=0.0) * left[None, :]
                    u = tl.load(u_place + other[:, None] * H * V, mask=in_v, other=0.0)
                    total = tl.dot(k, u, total, input_precision="ieee")
                place, mask = at_k * V + column, (at_k < K) & in_v
                S = tl.load(S_place + place, mask=mask, other=0.0) * fading + total
                tl.store(S_place + step * H * K * V + place, S, mask=mask)
            tl.debug_barrier()


class Pairs(NamedTuple):
    """B, M [H, W, CHUNK] and T [H, W, TILE] in fp32."""

    B: torch.Tensor
    M: torch.Tensor
    T: torch.Tensor


def delta_pairs(x: PreparedRows) -> Pairs:
    """The pairs of all tiles that have new tokens."""
    H, K, W = x.shape.heads, x.shape.K, x.rows
    sizes = CHUNK, CHUNK, TILE
    pairs = Pairs(*(torch.empty(H, W, n, dtype=torch.float32, device=x.k.device) for n in sizes))
    launch(
        _delta_pairs,
        (W // TILE, H),
        x.q,
        x.k,
        x.beta,
        x.G,
        *x.tables[:2],
        *pairs,
        W,
        H // x.shape.key_heads,
        K,
        PART=min(PART, next_power_of_2(K)),
        CHUNK=CHUNK,
        TILE=TILE,
        num_warps=PAIR_WARPS,
        num_stages=1,
    )
    return pairs


def delta_walk(
    x: PreparedRows, pairs: Pairs, u: torch.Tensor, S: torch.Tensor, keeps_all: bool
) -> torch.Tensor:
    """o of the new tokens, [T, H, V] in the compute dtype.

    u and S hold what came before, and then what follows. keeps_all: they have a place for each chunk, in
    which it leaves its u, and finds the state at its start; else one for each slot.
    """
    _, H, K, V = x.shape
    o = torch.empty(len(x.qkv), H, V, dtype=x.qkv.dtype, device=x.qkv.device)
    launch(
        _delta_walk,
        (len(x.tables.sequences), H, ceil_div(V, COLUMNS)),
        x.q,
        x.k,
        x.qkv,
        x.kv,
        x.beta,
        x.G,
        *pairs,
        x.tables.sequences,
        u,
        S,
        o,
        x.rows,
        int(keeps_all),
        H,
        H // x.shape.key_heads,
        K,
        V,
        x.shape.channels,
        sum(x.shape.widths[1:]),
        PART=min(PART, next_power_of_2(K)),
        COLUMNS=COLUMNS,
        CHUNK=CHUNK,
        TILE=TILE,
        num_warps=WARPS,
        num_stages=1,
    )
    return o
