"""The Triton kernel that walks backward through the delta rule. delta_rule.py has the equations.

It goes from a sequence's last tile to its first, and gives dr, dv, and dS at each chunk's end.
delta_bwd_triton.py has what depends on one chunk.

Shapes: as in delta_walk_triton.py; dr [H, W, V] and dS [n, H, K, V] in fp32, for n chunks.
Roundings: dv once.
Order: as in delta_walk_triton.py, with the tiles from the last to the first.
"""

import torch
import triton
import triton.language as tl

from .delta_rows_triton import WARPS, PreparedRows, place_rows
from .delta_walk_triton import PART, Pairs, live_tiles
from .exp_triton import expf
from .launch import ceil_div, launch, next_power_of_2
from .recurrent_state import CHUNK, TILE

# Columns of the values of a program. They decide no bit of a sum. With more, registers spill.
COLUMNS = 16


@triton.jit(do_not_specialize=["W"])
def _delta_walk_bwd(
    # pointers
    q_ptr,
    k_ptr,
    do_ptr,
    beta_ptr,
    G_ptr,
    B_ptr,
    M_ptr,
    T_ptr,
    sequences_ptr,
    dr_ptr,
    dS_ptr,
    dqkv_ptr,
    # sizes
    W,
    H,
    group,
    K,
    V,
    C,
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
    in_v, value = column < V, h * V + column
    chunks = tl.load(sequences_ptr + 5 * s + 3)
    end = live_tiles(sequences_ptr, s, TILE)[1]
    head, head_of_key = h.to(tl.int64) * W, (h // group).to(tl.int64) * W
    for back in range(end):
        tile = end - 1 - back
        p, local = tile % TILES, tile // TILES
        begin, tiles = (chunks + local) * CHUNK, min(TILES, end - local * TILES)
        rows = begin + p * TILE + t
        G_end = tl.load(G_ptr + head + begin + CHUNK - 1)
        left = expf((G_end - tl.load(G_ptr + head + rows)).to(tl.float32))[:, None]
        dS_place = dS_ptr + ((chunks + local).to(tl.int64) * H + h) * K * V
        du = tl.zeros([TILE, COLUMNS], tl.float32)
        for part in range(0, K, PART):
            in_k, down = (part + key)[None, :] < K, (part + key)[:, None]
            place = (head_of_key + rows)[:, None] * K + (part + key)[None, :]
            k = tl.load(k_ptr + place, mask=in_k, other=0.0) * left
            dS = tl.load(dS_place + down * V + column, mask=(down < K) & in_v, other=0.0)
            du = tl.dot(k, dS, du, input_precision="ieee")
        passed = tl.zeros([TILE, COLUMNS], tl.float32)
        for J in range(p, tiles):
            other = begin + J * TILE + t
            pairs = (head + other)[None, :] * CHUNK + (p * TILE + t)[:, None]  # transposed
            token, new, _ = place_rows(sequences_ptr, s, local * CHUNK + J * TILE + t)
            do = tl.load(do_ptr + token[:, None] * H * V + value, mask=new[:, None] & in_v, other=0.0)
            du = tl.dot(tl.load(M_ptr + pairs), do.to(tl.float32), du, input_precision="ieee")
            if p < J:
                A = tl.load(B_ptr + pairs) * tl.load(beta_ptr + head + other)[None, :]
                dr = tl.load(dr_ptr + (head + other)[:, None] * V + column, mask=in_v, other=0.0)
                passed = tl.dot(A, dr, passed, input_precision="ieee")
        T = tl.load(T_ptr + (head + rows)[None, :] * TILE + t[:, None])  # transposed
        dr = tl.dot(T, du - passed, input_precision="ieee")
        tl.store(dr_ptr + (head + rows)[:, None] * V + column, dr, mask=in_v)
        token, new, _ = place_rows(sequences_ptr, s, tile * TILE + t)
        dv = dr * tl.load(beta_ptr + head + rows)[:, None]
        dv_place = dqkv_ptr + token[:, None] * C + (C - H * V) + value
        tl.store(dv_place, dv.to(dqkv_ptr.dtype.element_ty), mask=new[:, None] & in_v)
        tl.debug_barrier()  # other threads of the program read dr
        if (p == 0) & (local > 0):
            fading = expf(tl.zeros([1, 1], tl.float32) + G_end.to(tl.float32))
            for part in range(0, K, PART):
                down = (part + key)[:, None]
                mask = (down < K) & in_v
                dS = tl.load(dS_place + down * V + column, mask=mask, other=0.0) * fading
                for J in range(tiles):
                    other = begin + J * TILE + t
                    token, new, _ = place_rows(sequences_ptr, s, local * CHUNK + J * TILE + t)
                    do = tl.load(do_ptr + token[:, None] * H * V + value, mask=new[:, None] & in_v, other=0.0)
                    dr = tl.load(dr_ptr + (head + other)[:, None] * V + column, mask=in_v, other=0.0)
                    dr = dr * tl.load(beta_ptr + head + other)[:, None]
                    eG = expf(tl.load(G_ptr + head + other).to(tl.float32))[None, :]
                    place = (head_of_key + other)[None, :] * K + down
                    q = tl.load(q_ptr + place, mask=down < K, other=0.0) * eG
                    k = tl.load(k_ptr + place, mask=down < K, other=0.0) * -eG
                    dS = tl.dot(q, do.to(tl.float32), dS, input_precision="ieee")
                    dS = tl.dot(k, dr, dS, input_precision="ieee")
                tl.store(dS_place - H * K * V + down * V + column, dS, mask=mask)
            tl.debug_barrier()


def delta_walk_bwd(
    do: torch.Tensor, x: PreparedRows, pairs: Pairs, S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dr, dS [n, H, K, V] as S, and a gradient of qkv [T, C] that has those of the values. do [T, H, V]."""
    (Hk, H, K, V), W = x.shape, x.rows
    dqkv, dr, dS = torch.empty_like(x.qkv), do.new_empty(H, W, V, dtype=torch.float32), torch.zeros_like(S)
    launch(
        _delta_walk_bwd,
        (len(x.tables.sequences), H, ceil_div(V, COLUMNS)),
        x.q,
        x.k,
        do,
        x.beta,
        x.G,
        *pairs,
        x.tables.sequences,
        dr,
        dS,
        dqkv,
        W,
        H,
        H // Hk,
        K,
        V,
        x.shape.channels,
        PART=min(PART, next_power_of_2(K)),
        COLUMNS=COLUMNS,
        CHUNK=CHUNK,
        TILE=TILE,
        num_warps=WARPS,
        num_stages=1,
    )
    return dr, dS, dqkv
