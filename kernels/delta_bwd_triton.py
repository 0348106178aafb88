"""Triton kernels of the delta rule's backward over whole sequences. delta_rule.py has the equations.

delta_walk_bwd_triton.py gives dr, dv, and dS at each chunk's end. All else depends on one chunk, and is here:
_delta_pairs_bwd gives dA and dM, _delta_rows_bwd the gradients of q and k, and _delta_gates_bwd those of a
and b.

Shapes: as in delta_walk_triton.py, for a walk that kept the u of all rows and the S of all chunks; u [n,
CHUNK, H, V], S, dS [n, H, K, V] for n chunks; dr [H, W, V], dq, dk [H, W, K], to_q, to_k [H, W, CHUNK] in
fp32; parts of dG in fp64.
Roundings: da and db once each. The sums of dG, and those of dbeta over columns, are in fp64.
Order: as in delta_walk_triton.py; within a sum in ascending order. Sums along a row, and over a state, are
those of parts of PART columns, one after another.
"""

import torch
import triton
import triton.language as tl

from .delta_rows_triton import WARPS, PreparedRows, place_rows
from .delta_walk_bwd_triton import delta_walk_bwd
from .delta_walk_triton import PAIR_WARPS, PART, Pairs, live_tiles
from .exp_triton import expf, sigmoid
from .launch import dense, launch, next_power_of_2
from .recurrent_state import CHUNK, TILE


@triton.jit(do_not_specialize=["W"])
def _delta_pairs_bwd(
    # pointers
    do_ptr,
    beta_ptr,
    G_ptr,
    B_ptr,
    M_ptr,
    u_ptr,
    dr_ptr,
    sequences_ptr,
    chunks_ptr,
    to_q_ptr,
    to_k_ptr,
    rows_ptr,
    columns_ptr,
    dbeta_ptr,
    # sizes
    W,
    H,
    V,
    # constants
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    tile, h = tl.program_id(0), tl.program_id(1)
    chunk, p = tile * TILE // CHUNK, tile % (CHUNK // TILE)
    s = tl.load(chunks_ptr + chunk)
    local = chunk - tl.load(sequences_ptr + 5 * s + 3)
    t, value, head = tl.arange(0, TILE), tl.arange(0, PART), h.to(tl.int64) * W
    token, new, _ = place_rows(sequences_ptr, s, local * CHUNK + p * TILE + t)
    row = tile * TILE + t
    end = live_tiles(sequences_ptr, s, TILE)[1]
    past = tl.where(local * (CHUNK // TILE) + p < end, p + 1, 0)  # tiles up to this one, if it is live
    G, beta = tl.load(G_ptr + head + row), tl.load(beta_ptr + head + row)[:, None]
    row_sums, dbeta = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    for J in range(past):
        other = chunk * CHUNK + J * TILE + t
        u_rows = (chunk.to(tl.int64) * CHUNK + J * TILE + t)[:, None] * H * V + h * V
        dA, dM = tl.zeros([TILE, TILE], tl.float32), tl.zeros([TILE, TILE], tl.float32)
        for part in range(0, V, PART):
            column = part + value[None, :]
            in_v = column < V
            do = tl.load(
                do_ptr + token[:, None] * H * V + h * V + column, mask=new[:, None] & in_v, other=0.0
            )
            dr = tl.load(dr_ptr + (head + row)[:, None] * V + column, mask=new[:, None] & in_v, other=0.0)
            u = tl.trans(tl.load(u_ptr + u_rows + column, mask=in_v, other=0.0))
            dM = tl.dot(do.to(tl.float32), u, dM, input_precision="ieee")
            dA = tl.dot(-dr, u, dA, input_precision="ieee")
        D = (G[:, None] - tl.load(G_ptr + head + other)[None, :]).to(tl.float32)
        D = expf(tl.where(row[:, None] >= other[None, :], D, -float("inf")))
        place = (head + row)[:, None] * CHUNK + (J * TILE + t)[None, :]
        live = new[:, None] & (row[:, None] >= other[None, :])
        B, M = tl.load(B_ptr + place, mask=live, other=0.0), tl.load(M_ptr + place, mask=live, other=0.0)
        below = row[:, None] > other[None, :]
        tl.store(to_q_ptr + place, dM * D)
        tl.store(to_k_ptr + place, tl.where(below, dA * D * beta, 0.0))
        both = (dM * M + dA * (B * beta)).to(tl.float64)
        row_sums += tl.sum(both, axis=1)
        dbeta += tl.sum((dA * B).to(tl.float64), axis=1)
        sums = columns_ptr + (h.to(tl.int64) * (W // TILE) + tile) * CHUNK + J * TILE
        tl.store(sums + t, tl.sum(both, axis=0))
    tl.store(rows_ptr + head + row, row_sums)
    tl.store(dbeta_ptr + head + row, dbeta)


@triton.jit(do_not_specialize=["W"])
def _delta_rows_bwd(
    # pointers
    q_ptr,
    k_ptr,
    qkv_ptr,
    do_ptr,
    beta_ptr,
    G_ptr,
    u_ptr,
    S_ptr,
    dr_ptr,
    dS_ptr,
    to_q_ptr,
    to_k_ptr,
    sequences_ptr,
    chunks_ptr,
    dq_ptr,
    dk_ptr,
    states_ptr,
    carried_ptr,
    dbeta_ptr,
    # sizes
    W,
    H,
    group,
    K,
    V,
    C,
    # constants
    PART: tl.constexpr,
    V_PART: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    TILES: tl.constexpr = CHUNK // TILE
    tile, h = tl.program_id(0), tl.program_id(1)
    chunk, p = tile * TILE // CHUNK, tile % TILES
    s = tl.load(chunks_ptr + chunk)
    local = chunk - tl.load(sequences_ptr + 5 * s + 3)
    t, head, head_of_key = tl.arange(0, TILE), h.to(tl.int64) * W, (h // group).to(tl.int64) * W
    token, new, _ = place_rows(sequences_ptr, s, local * CHUNK + p * TILE + t)
    end = live_tiles(sequences_ptr, s, TILE)[1]
    tiles = min(TILES, end - local * TILES)
    past = tl.where(p < tiles, p + 1, 0)  # tiles up to this one, if it is live
    rows, begin = tile * TILE + t, chunk * CHUNK
    G, beta = tl.load(G_ptr + head + rows), tl.load(beta_ptr + head + rows)[:, None]
    eG = expf(G.to(tl.float32))[:, None]
    left = expf((tl.load(G_ptr + head + begin + CHUNK - 1) - G).to(tl.float32))[:, None]
    states, u_rows = (chunk.to(tl.int64) * H + h) * K * V, (chunk.to(tl.int64) * CHUNK + p * TILE + t) * H + h
    dbeta, by_states = tl.load(dbeta_ptr + head + rows), tl.zeros([TILE], tl.float64)
    carried = tl.zeros([TILE], tl.float64)
    for part in range(0, K, PART):
        key = part + tl.arange(0, PART)[None, :]
        in_k, mask_k = key < K, new[:, None] & (key < K)
        by_state, rest = tl.zeros([TILE, PART], tl.float32), tl.zeros([TILE, PART], tl.float32)
        by_end = tl.zeros([TILE, PART], tl.float32)
        for v_part in range(0, V, V_PART):
            column = v_part + tl.arange(0, V_PART)[None, :]
            down, mask = v_part + tl.arange(0, V_PART)[:, None], new[:, None] & (column < V)
            do = tl.load(do_ptr + token[:, None] * H * V + h * V + column, mask=mask, other=0.0)
            dr = tl.load(dr_ptr + (head + rows)[:, None] * V + column, mask=mask, other=0.0)
            u = tl.load(u_ptr + u_rows[:, None] * V + column, mask=mask, other=0.0)
            S = tl.load(S_ptr + states + key * V + down, mask=in_k & (down < V), other=0.0)  # transposed
            by_state = tl.dot(do.to(tl.float32), S, by_state, input_precision="ieee")
            rest = tl.dot(dr, S, rest, input_precision="ieee")
            dS = tl.load(dS_ptr + states + key * V + down, mask=in_k & (down < V), other=0.0)
            by_end = tl.dot(u, dS, by_end, input_precision="ieee")
        row_place = (head_of_key + rows)[:, None] * K + key
        q, k = (
            tl.load(q_ptr + row_place, mask=mask_k, other=0.0),
            tl.load(k_ptr + row_place, mask=mask_k, other=0.0),
        )
        by_state, rest, by_end = by_state * eG, rest * eG, by_end * left
        ends, rests = (by_end * k).to(tl.float64), (rest * k).to(tl.float64)
        carried += tl.sum(ends, axis=1)
        by_states += tl.sum((by_state * q).to(tl.float64) - rests * beta.to(tl.float64) - ends, axis=1)
        dbeta -= tl.sum(rests, axis=1)
        dq, dk = by_state, by_end - rest * beta
        for J in range(past):
            other = begin + J * TILE + t
            pairs = (head + rows)[:, None] * CHUNK + (J * TILE + t)[None, :]
            k = tl.load(k_ptr + (head_of_key + other)[:, None] * K + key, mask=in_k, other=0.0)
            dq = tl.dot(tl.load(to_q_ptr + pairs), k, dq, input_precision="ieee")
            dk = tl.dot(tl.load(to_k_ptr + pairs), k, dk, input_precision="ieee")
        for J in range(p, tiles):
            other = begin + J * TILE + t
            pairs = (head + other)[None, :] * CHUNK + (p * TILE + t)[:, None]  # transposed
            q = tl.load(q_ptr + (head_of_key + other)[:, None] * K + key, mask=in_k, other=0.0)
            k = tl.load(k_ptr + (head_of_key + other)[:, None] * K + key, mask=in_k, other=0.0)
            dk = tl.dot(tl.load(to_q_ptr + pairs), q, dk, input_precision="ieee")
            dk = tl.dot(tl.load(to_k_ptr + pairs), k, dk, input_precision="ieee")
        value_row = (head + rows)[:, None] * K + key
        tl.store(dq_ptr + value_row, dq, mask=mask_k)
        tl.store(dk_ptr + value_row, dk, mask=mask_k)
    for v_part in range(0, V, V_PART):
        column = v_part + tl.arange(0, V_PART)[None, :]
        mask = new[:, None] & (column < V)
        dr = tl.load(dr_ptr + (head + rows)[:, None] * V + column, mask=mask, other=0.0)
        v = tl.load(qkv_ptr + token[:, None] * C + (C - H * V) + h * V + column, mask=mask, other=0.0)
        dbeta += tl.sum((dr * v.to(tl.float32)).to(tl.float64), axis=1)
    tl.store(states_ptr + head + rows, by_states)
    tl.store(carried_ptr + head + rows, carried)
    tl.store(dbeta_ptr + head + rows, dbeta)


@triton.jit(do_not_specialize=["W"])
def _delta_gates_bwd(
    # pointers
    a_ptr,
    A_log_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    G_ptr,
    S_ptr,
    dS_ptr,
    rows_ptr,
    columns_ptr,
    states_ptr,
    carried_ptr,
    dbeta_ptr,
    sequences_ptr,
    chunks_ptr,
    da_ptr,
    db_ptr,
    dA_log_ptr,
    dx_ptr,
    # sizes
    W,
    H,
    SIZE,
    # constants
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    chunk, h = tl.program_id(0), tl.program_id(1)
    s = tl.load(chunks_ptr + chunk)
    local = chunk - tl.load(sequences_ptr + 5 * s + 3)
    i = tl.arange(0, CHUNK)
    token, new, _ = place_rows(sequences_ptr, s, local * CHUNK + i)
    end = live_tiles(sequences_ptr, s, TILE)[1]
    row = h.to(tl.int64) * W + chunk * CHUNK + i
    dG, carried = tl.load(rows_ptr + row) + tl.load(states_ptr + row), tl.load(carried_ptr + row)
    for tile in range(min(CHUNK // TILE, end - local * (CHUNK // TILE))):
        sums = columns_ptr + (h.to(tl.int64) * (W // TILE) + chunk * (CHUNK // TILE) + tile) * CHUNK
        dG -= tl.load(sums + i, mask=i < (tile + 1) * TILE, other=0.0)
    states, part = (chunk.to(tl.int64) * H + h) * SIZE, tl.arange(0, PART)
    total = tl.zeros([PART], tl.float64)
    for first in range(0, SIZE, PART):
        mask = first + part < SIZE
        S = tl.load(S_ptr + states + first + part, mask=mask, other=0.0)
        total += (S * tl.load(dS_ptr + states + first + part, mask=mask, other=0.0)).to(tl.float64)
    fading = expf(tl.load(G_ptr + row).to(tl.float32)).to(tl.float64)  # read for the chunk's last row
    end_sum = tl.sum(carried, axis=0) + tl.sum(total, axis=0) * fading
    dG += tl.where(i == CHUNK - 1, end_sum, 0.0)
    dg = tl.cumsum(dG, 0, reverse=True).to(tl.float32)
    x = tl.load(a_ptr + token * H + h, mask=new, other=0.0).to(tl.float32)
    x += tl.load(dt_bias_ptr + h).to(tl.float32)
    dx = dg * -expf(tl.load(A_log_ptr + h).to(tl.float32) + tl.zeros([CHUNK], tl.float32)) * sigmoid(x)
    beta = tl.load(beta_ptr + row)
    db = tl.load(dbeta_ptr + row).to(tl.float32) * beta * (1.0 - beta)
    tl.store(da_ptr + token * H + h, dx.to(da_ptr.dtype.element_ty), mask=new)
    tl.store(db_ptr + token * H + h, db.to(db_ptr.dtype.element_ty), mask=new)
    tl.store(dx_ptr + token * H + h, dx, mask=new)
    tl.store(dA_log_ptr + token * H + h, dg * tl.load(g_ptr + row), mask=new)


def delta_bwd(
    do: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    x: PreparedRows,
    pairs: Pairs,
    u: torch.Tensor,
    S: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The gradients of qkv [T, C], a and b [T, H], and each token's part of those of A_log and dt_bias.

    do [T, H, V]; u [n, CHUNK, H, V] and S [n, H, K, V]: of a walk that kept all. Parts: [T, H] in fp32.
    """
    (Hk, H, K, V), W, do, device = x.shape, x.rows, dense(do), do.device
    sizes = {"H": H, "group": H // Hk, "K": K, "V": V, "C": x.shape.channels}
    tiles = {"CHUNK": CHUNK, "TILE": TILE, "num_warps": WARPS}
    part, v_part = (min(PART, next_power_of_2(n)) for n in (K, V))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    dr, dS, dqkv = delta_walk_bwd(do, x, pairs, S)
    to_q, to_k = empty(H, W, CHUNK), empty(H, W, CHUNK)
    row_sums, by_states, carried, dbeta = (empty(H, W, dtype=torch.float64) for _ in range(4))
    columns = empty(H, W // TILE, CHUNK, dtype=torch.float64)
    launch(
        _delta_pairs_bwd,
        (W // TILE, H),
        do,
        x.beta,
        x.G,
        *pairs[:2],
        u,
        dr,
        *x.tables[:2],
        to_q,
        to_k,
        row_sums,
        columns,
        dbeta,
        W,
        H,
        V,
        PART=v_part,
        num_stages=1,
        **tiles | {"num_warps": PAIR_WARPS},
    )
    dq, dk = empty(H, W, K), empty(H, W, K)
    launch(
        _delta_rows_bwd,
        (W // TILE, H),
        x.q,
        x.k,
        x.qkv,
        do,
        x.beta,
        x.G,
        u,
        S,
        dr,
        dS,
        to_q,
        to_k,
        *x.tables[:2],
        dq,
        dk,
        by_states,
        carried,
        dbeta,
        W,
        *sizes.values(),
        PART=part,
        V_PART=v_part,
        num_stages=1,
        **tiles,
    )
    x.inputs_bwd(dq, dk, dqkv)
    da, db = torch.empty_like(dense(a)), torch.empty_like(dense(b))
    dA_log, dx = empty(*a.shape), empty(*a.shape)
    launch(
        _delta_gates_bwd,
        (W // CHUNK, H),
        dense(a),
        dense(A_log),
        dense(dt_bias),
        x.g,
        x.beta,
        x.G,
        S,
        dS,
        row_sums,
        columns,
        by_states,
        carried,
        dbeta,
        *x.tables[:2],
        da,
        db,
        dA_log,
        dx,
        W,
        H,
        K * V,
        PART=1024,
        **tiles,
    )
    return dqkv, da, db, dA_log, dx
