"""The reference of delta_rule.py, which has its equations, roundings and order.

Shapes: N heads of all sequences; L chunks of CHUNK rows; n tiles of TILE rows; K and V the widths of a key
and a value. Rows without a token are 0.
"""

from dataclasses import dataclass

import torch

from .order import sum_row
from .recurrent_state import CHUNK, TILE

_TILES = CHUNK // TILE  # of a chunk


@dataclass(frozen=True)
class DeltaRows:
    """The rows of the delta rule: q (scaled), k [N, L CHUNK, K], v [N, L CHUNK, V], g, beta [N, L CHUNK]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def log_decay(self) -> torch.Tensor:
        """G [N, L, CHUNK]: the sums of g from a chunk's start, in fp64.

        Differences of them are needed. In fp32 they would lose the digits that matter.
        """
        return self.g.view(len(self.g), -1, CHUNK).double().cumsum(-1)


@dataclass(frozen=True)
class Walked:
    """What `walk` gives of n tiles.

    o, u [N, n TILE, V]; starts [N, L + 1, K, V]: the state at the start of each chunk; after the last full
    one it stays; A [N, n, TILE, CHUNK]; inverse [N, n, TILE, TILE].
    """

    o: torch.Tensor
    u: torch.Tensor
    starts: torch.Tensor
    A: torch.Tensor
    inverse: torch.Tensor


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched a b of a fixed shape. A sum of zeros is +0.0, whatever the signs of its zeros.

    One batch alone would be another call of the library.
    """
    if len(a) == 1:
        return torch.bmm(a.expand(2, -1, -1).contiguous(), b.expand(2, -1, -1).contiguous())[:1].add_(0.0)
    return torch.bmm(a, b).add_(0.0)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """The transposes of matrices, in memory."""
    return x.transpose(-1, -2).contiguous()


def _decay(G_rows: torch.Tensor, G: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e^(G_t - G_j) for keys j of the chunk up to row t, and 0 above: [N, n, R, CHUNK].

    G_rows [N, n, R], G [N, n, CHUNK], rows [n, R] in the chunk. Above the diagonal the difference is positive
    and may overflow, so it is masked before the exponential.
    """
    later = torch.arange(CHUNK) > rows.unsqueeze(-1)
    difference = (G_rows.unsqueeze(-1) - G.unsqueeze(-2)).to(dtype)
    return difference.masked_fill_(later, -torch.inf).exp_()


def _unit_lower_inverse(A: torch.Tensor) -> torch.Tensor:
    """(1 + A)^-1 of A [M, TILE, TILE], of which the part below the diagonal is read.

    By blocks of 1, 2, 4 and 8 rows: (P 0; Q R)^-1 = (P' 0; -R' Q P'  R'). A row reads the rows before it
    only. Powers of A would lose digits where keys repeat.
    """
    M, inverse = len(A), A.new_ones(len(A), TILE, 1, 1)
    while (size := inverse.shape[-1]) < TILE:
        pairs = TILE // (2 * size)
        blocks = A.view(M, pairs, 2 * size, pairs, 2 * size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        Q = blocks[:, :, size:, :size].reshape(-1, size, size)
        P, R = (x.reshape(-1, size, size) for x in (inverse[:, 0::2], inverse[:, 1::2]))
        joined = A.new_zeros(M * pairs, 2 * size, 2 * size)
        joined[:, :size, :size], joined[:, size:, size:] = P, R
        joined[:, size:, :size] = -_product(R, _product(Q, P))
        inverse = joined.view(M, pairs, 2 * size, 2 * size)
    return inverse.view(M, TILE, TILE)


def next_state(state: torch.Tensor, k: torch.Tensor, G: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The state [N, K, V] at the end of a full chunk. k [N, CHUNK, K], G [N, CHUNK], u [N, CHUNK, V]."""
    left, end = _fading(G, u.dtype)
    return state * end + _product(_turned(k * left), u)


def _fading(G: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """e^(G_end - G_j) [N, CHUNK, 1], and e^G_end [N, 1, 1]."""
    end = G[:, -1:]
    return (end - G).to(dtype).exp_().unsqueeze(-1), end.to(dtype).exp().unsqueeze(-1)


def walk(x: DeltaRows, start: torch.Tensor, u: torch.Tensor, first: int, end: int) -> Walked:
    """Tiles first .. end of all rows, which begin in the first chunk.

    start [N, K, V]: the state at the first chunk's start. u [N, CHUNK, V]: of that chunk's rows before tile
    `first`, 0 from there on. Every product has the shape of a whole tile, so a row has the same bits whether
    its tile is whole or not.
    """
    N, K, V, dtype = len(x.v), x.k.shape[-1], x.v.shape[-1], x.v.dtype
    chunk = torch.arange(first, end) // _TILES
    rows = (torch.arange(first, end) % _TILES * TILE).unsqueeze(-1) + torch.arange(TILE)

    def cut(y: torch.Tensor) -> torch.Tensor:
        return y.reshape(N, -1, TILE, *y.shape[2:])[:, first:end]

    G, b = x.log_decay(), cut(x.beta).unsqueeze(-1)
    Gt, kq = cut(G.flatten(1)), torch.cat([cut(x.k), cut(x.q)], 2)  # [N, n, 2 TILE, K]
    keys = _turned(x.k.view(N, -1, CHUNK, K))[:, chunk]
    pairs = _product(kq.flatten(0, 1), keys.flatten(0, 1)).view(N, -1, 2, TILE, CHUNK)
    D = _decay(Gt, G[:, chunk], rows, dtype)
    diagonal = torch.arange(CHUNK) == rows.unsqueeze(-1)
    A = (pairs[:, :, 0] * D * b).masked_fill_(diagonal, 0.0)
    M = pairs[:, :, 1] * D
    tile_of = (torch.arange(first, end) % _TILES).tolist()
    squares = torch.stack([A[:, i, :, p * TILE : (p + 1) * TILE] for i, p in enumerate(tile_of)], 1)
    inverse = _unit_lower_inverse(squares.flatten(0, 1)).view(squares.shape)
    eG, vt = Gt.to(dtype).exp().unsqueeze(-1), cut(x.v)
    o, us = torch.empty_like(vt), torch.empty_like(vt)
    states, state, u = [start], start, u.clone()
    for i, p in enumerate(tile_of):
        kS, qS = _product(kq[:, i], state).split(TILE, 1)
        rest = (vt[:, i] - kS * eG[:, i]) * b[:, i] - _product(A[:, i], u)  # u is 0 from this tile on
        us[:, i] = u[:, p * TILE : (p + 1) * TILE] = _product(inverse[:, i], rest)
        o[:, i] = qS * eG[:, i] + _product(M[:, i], u)
        if p == _TILES - 1:
            c = int(chunk[i])
            state = next_state(state, x.k.view(N, -1, CHUNK, K)[:, c], G[:, c], u)
            states.append(state)
            u = torch.zeros_like(u)
    states += [state] * (G.shape[1] + 1 - len(states))
    return Walked(o.view(N, -1, V), us.view(N, -1, V), torch.stack(states, 1), A, inverse)


def walk_bwd(x: DeltaRows, do: torch.Tensor) -> DeltaRows:
    """The gradients of the rows of whole sequences. do like v."""
    return walk_after_bwd(x, do, x.v.new_zeros(len(x.v), x.k.shape[-1], x.v.shape[-1]))[0]


def walk_after_bwd(
    x: DeltaRows,
    do: torch.Tensor,
    start: torch.Tensor,
    ends: torch.Tensor | None = None,
    dend: torch.Tensor | None = None,
) -> tuple[DeltaRows, torch.Tensor]:
    """The gradients of the rows, and of the state `start` [N, K, V] before the first chunk. do like v.

    ends [N], dend [N, K, V]: a chunk of each head, and the gradient of the state at its start that comes from
    elsewhere.
    """
    N, (K, V) = len(x.v), (x.k.shape[-1], x.v.shape[-1])

    def joined(dS: torch.Tensor, chunk: int) -> torch.Tensor:
        return dS if ends is None else dS + torch.where((ends == chunk).view(-1, 1, 1), dend, 0.0)

    q, k, v, beta, do = (y.view(N, -1, CHUNK, *y.shape[2:]) for y in (x.q, x.k, x.v, x.beta, do))
    L, G = k.shape[1], x.log_decay()
    ahead = walk(x, start, v.new_zeros(N, CHUNK, V), 0, L * _TILES)
    u, A, inverse = (y.view(N, L, *size) for y, size in _by_chunk(ahead))
    dq, dk, dv, dbeta = (torch.empty_like(y) for y in (q, k, v, beta))
    dG, dS = torch.empty_like(G), v.new_zeros(N, K, V)
    for c in reversed(range(L)):
        rows = DeltaRows(q[:, c], k[:, c], v[:, c], G[:, c], beta[:, c])
        after = u[:, c], A[:, c], inverse[:, c], joined(dS, c + 1)
        grads, dS = _chunk_bwd(rows, do[:, c], ahead.starts[:, c], *after)
        dq[:, c], dk[:, c], dv[:, c], dG[:, c], dbeta[:, c] = vars(grads).values()
    dg = dG.flip(-1).cumsum(-1).flip(-1).to(x.g.dtype)
    return DeltaRows(*(y.flatten(1, 2) for y in (dq, dk, dv, dg, dbeta))), joined(dS, 0)


def _by_chunk(ahead: Walked):
    """u, A and inverse of a walk over whole chunks, each with the sizes of one chunk."""
    yield ahead.u, (CHUNK, ahead.u.shape[-1])
    yield ahead.A, (CHUNK, CHUNK)
    yield ahead.inverse, (_TILES, TILE, TILE)


def _solved_from_the_end(A: torch.Tensor, inverse: torch.Tensor, du: torch.Tensor) -> torch.Tensor:
    """(1 + A)^-T du, tile by tile from the last one. A [N, CHUNK, CHUNK], inverse [N, _TILES, TILE, TILE]."""
    dr, At, Tt = torch.zeros_like(du), _turned(A), _turned(inverse)
    for p in reversed(range(_TILES)):
        tile = slice(p * TILE, (p + 1) * TILE)
        dr[:, tile] = _product(Tt[:, p], du[:, tile] - _product(At[:, tile], dr))
    return dr


def _chunk_bwd(
    x: DeltaRows,
    do: torch.Tensor,
    S: torch.Tensor,
    u: torch.Tensor,
    A: torch.Tensor,
    inverse: torch.Tensor,
    dS: torch.Tensor,
) -> tuple[DeltaRows, torch.Tensor]:
    """The gradients of one chunk's rows, and that of the state S [N, K, V] at its start.

    x.g is G here, and so is its gradient, in fp64. dS: of the state at the chunk's end.
    """
    q, k, b, G, dtype = x.q, x.k, x.beta.unsqueeze(-1), x.g, x.v.dtype
    D = _decay(G.unsqueeze(1), G.unsqueeze(1), torch.arange(CHUNK).unsqueeze(0), dtype)[:, 0]
    (left, end), eG = _fading(G, dtype), G.to(dtype).exp().unsqueeze(-1)
    kt, ut, St = _turned(k), _turned(u), _turned(S)
    qk, kk = _product(q, kt) * D, (_product(k, kt) * D).tril(-1)
    du = _product(_turned(qk), do) + _product(k * left, dS)
    dr = _solved_from_the_end(A, inverse, du)
    dA, bdr, kS = -_product(dr, ut), dr * b, _product(k, S) * eG
    dbeta = (dr * (x.v - kS)).sum(-1) + (dA * kk).sum(-1)
    dM = _product(do, ut)
    to_qk, to_kk = dM * D, (dA * D * b).tril(-1)
    by_state, by_rest, by_end = _product(do, St), _product(bdr, St), _product(u, _turned(dS)) * left
    dq = by_state * eG + _product(to_qk, k)
    dk = _product(_turned(to_qk), q) + _product(to_kk, k) + _product(_turned(to_kk), k)
    dk = dk - by_rest * eG + by_end
    # Of G: rows minus columns of what A and M pass on, e^G, and the fading to the chunk's end.
    pairs = (dM * qk + dA * A).double()
    carried = (by_end * k).sum(-1, dtype=torch.float64)
    dG = pairs.sum(-1) - _turned(pairs).sum(-1) - carried
    dG += (by_state * eG * q).sum(-1, dtype=torch.float64) - (bdr * kS).sum(-1, dtype=torch.float64)
    dG[:, -1] += carried.sum(-1) + sum_row((S * dS).flatten(1)) * end[:, 0, 0]
    dS = dS * end + _product(_turned(q * eG), do) - _product(_turned(k * eG), bdr)
    return DeltaRows(dq, dk, bdr, dG, dbeta), dS
