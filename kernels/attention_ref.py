"""The reference of attention.py, which has its equations, shapes, roundings and order."""

from collections.abc import Iterator

import numpy as np
import torch

from .attention_plan import KEY_TILE, AttentionPlan
from .attention_rule import WALK, AttentionRule
from .grad import accumulate_dtype
from .order import ALIGN

# Positions of one step of the backward. The step bounds the score matrix and skips most keys after the
# queries. It is a constant, because it orders dk and dv.
QUERY_CHUNK = 32
# Elements of a score matrix in the backward. The limit bounds memory only: it decides how many sequences go
# in one call.
SCORE_ELEMENTS = 1 << 22


def attention_ref(
    q: torch.Tensor,
    tiles: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    rule: AttentionRule = WALK,
    want_lse: bool = True,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Forward only.

    q [T, Hq, D], tiles [tiles, 2, KEY_TILE, D], sinks [T, Hq] in fp32 or None.
    Returns o like q, and lse [T, Hq] in fp32, or None where lse is not wanted.
    """
    T, H, D = q.shape
    acc_dtype = accumulate_dtype(q.dtype)
    index = plan.index(D, acc_dtype, rule)
    q_tiles = q.reshape(T * H, D).index_select(0, index.rows).to(acc_dtype).view(-1, index.tile_rows, D)
    q_tiles *= scale
    o = torch.empty_like(q_tiles)
    lse = q_tiles.new_empty(*q_tiles.shape[:2], 1)
    if sinks is not None:
        sinks = sinks.reshape(-1).index_select(0, index.rows).view_as(lse)
    for group in index.groups:
        members = slice(group.start, group.start + group.bias.shape[0])
        kv = tiles.index_select(0, group.tiles).to(acc_dtype)
        m, l, acc = _group_ref(q_tiles[members], kv, group.bias, rule)
        if sinks is not None:
            m, a, b = join_sink(m, sinks[members])
            l, acc = (l * a).add_(b), acc.mul_(a)
        torch.div(acc, l, out=o[members])
        if want_lse:
            torch.add(m, l.log_(), out=lse[members])
    if rule.chunk:
        o += 0.0
    o = o.to(q.dtype).view(-1, D).index_select(0, index.inverse).view(T, H, D)
    return o, lse.view(-1).index_select(0, index.inverse).view(T, H) if want_lse else None


# The maximum m and the sum l, [c, R, 1] each, and the unnormalised output [c, R, D] of query tiles.
_State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _group_ref(q: torch.Tensor, kv: torch.Tensor, bias: torch.Tensor, rule: AttentionRule) -> _State:
    """The state of one group after all its keys.

    q [c, R, D] already scaled, kv [c * J, 2, KEY_TILE, D], bias [c, M, R, KEY_TILE].
    """
    c, R, D = q.shape
    kv = kv.view(c, -1, 2, KEY_TILE, D)
    J = kv.shape[1]
    k = kv.view(c * J, 2, KEY_TILE, D)[:, 0].transpose(1, 2)
    s = torch.bmm(q.unsqueeze(1).expand(c, J, R, D).reshape(c * J, R, D), k).view(c, J, R, KEY_TILE)
    if rule.cap:
        s.div_(rule.cap).tanh_().mul_(rule.cap)
    s[:, J - bias.shape[1] :] += bias
    step = rule.chunk // KEY_TILE or J
    state = _chunk_ref(s[:, :step], kv[:, :step, 1])
    for j in range(step, J, step):
        state = _join(state, _chunk_ref(s[:, j : j + step], kv[:, j : j + step, 1]))
    return state


def _chunk_ref(s: torch.Tensor, v: torch.Tensor) -> _State:
    """The state after one chunk alone.

    Scores s [c, J, R, KEY_TILE], which it overwrites; v [c, J, KEY_TILE, D].
    """
    m = s.amax(-1, keepdim=True).amax(1)
    p = s.sub_(_finite(m).unsqueeze(1)).exp_()
    l = p.sum(-1, keepdim=True).cumsum(1)[:, -1]
    # The sum begins with +0.0, so that the zeros of a hidden tile never turn a -0.0 into a +0.0.
    acc = s.new_zeros(*m.shape[:2], v.shape[-1])
    for j in range(s.shape[1]):
        acc.baddbmm_(p[:, j], v[:, j])
    return m, l, acc


def _join(row: _State, chunk: _State) -> _State:
    """The state of a row after one more chunk."""
    (M, L, A), (m, l, acc) = row, chunk
    high = torch.maximum(M, m)
    a, b = (M - _finite(high)).exp_(), (m - _finite(high)).exp_()
    return high, (L * a).add_(l * b), (A * a).add_(acc * b)


def join_sink(m: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The maximum of a row and its sink, and the factors of what the row was, and of the sink's 1."""
    high = torch.maximum(m, sinks)
    return high, (m - high).exp_(), (sinks - high).exp_()


def _finite(m: torch.Tensor) -> torch.Tensor:
    """What is subtracted of scores with the maximum m: 0 where no key is visible."""
    return m.masked_fill(m == -torch.inf, 0.0)


def gather_tiles(k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The key tiles of packed keys and values, in fp32 because each tile is read many times.

    k, v [K, Hkv, D], rows [blocks, KEY_TILE] -> [blocks * Hkv, 2, KEY_TILE, D].
    """
    kv = torch.stack([k, v], dim=1).to(accumulate_dtype(k.dtype))[rows]  # [blocks, KEY_TILE, 2, Hkv, D]
    return kv.permute(0, 3, 2, 1, 4).reshape(-1, 2, KEY_TILE, k.shape[-1])


def _bwd_group(q, k, v, do, lse, delta, scale, first, rule):
    """dq, dk and dv of sequences that are padded to one length L.

    The rows of q begin with position `first`, a multiple of QUERY_CHUNK. A row that stands for no query has
    lse = inf, so that its p is 0.
    q, do [S * Hkv, (L - first) * G, D]; k, v [S * Hkv, L, D]; lse, delta [S * Hkv, (L - first) * G, 1].
    """
    L = k.shape[1]
    G = q.shape[1] // (L - first)
    q = q * scale
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for a in range(first, L, QUERY_CHUNK):
        b = min(a + QUERY_CHUNK, L)
        rows = slice((a - first) * G, (b - first) * G)
        keys, queries = torch.arange(b), torch.arange(a, b).repeat_interleave(G).unsqueeze(1)
        hidden = keys > queries
        if rule.window:
            hidden |= keys <= queries - rule.window
        s = torch.bmm(q[:, rows], k[:, :b].transpose(1, 2))
        if rule.cap:
            t = s.div_(rule.cap).tanh_()
            s = t * rule.cap
        p = s.sub_(lse[:, rows]).exp_().masked_fill_(hidden, 0.0)
        ds = torch.bmm(do[:, rows], v[:, :b].transpose(1, 2)).sub_(delta[:, rows]).mul_(p)
        if rule.cap:
            ds.mul_(t.mul_(t).neg_().add_(1.0))
        dv[:, :b] += torch.bmm(p.transpose(1, 2), do[:, rows])
        dk[:, :b] += torch.bmm(ds.transpose(1, 2), q[:, rows])
        torch.bmm(ds, k[:, :b], out=dq[:, rows])
    return dq.mul_(scale), dk, dv


def _padded_rows(
    starts: np.ndarray, before: np.ndarray, counts: np.ndarray, first: int, L: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The packed row of each position first .. L - 1 of S sequences, and whether the position has a row.

    In each sequence the first `before` positions have no row, and the next `counts` positions have one. A
    position without a row gets another row of its own sequence. Both results are [S, L - first].
    """
    within = np.arange(first, L) - before[:, None]
    inside = (within >= 0) & (within < counts[:, None])
    return torch.from_numpy(starts[:, None] + within.clip(0, counts[:, None] - 1)), torch.from_numpy(inside)


def _length_batches(plan: AttentionPlan) -> Iterator[tuple[np.ndarray, int]]:
    """Indices of sequences whose lengths round up to the same L, as many as one call takes, and that L."""
    padded = -(-np.asarray(plan.lengths) // ALIGN) * ALIGN
    for length in np.unique(padded):
        L = int(length)
        members = np.flatnonzero(padded == L)
        batch_size = max(1, SCORE_ELEMENTS // (plan.heads * min(L, QUERY_CHUNK) * L))
        for i in range(0, len(members), batch_size):
            yield members[i : i + batch_size], L


def _heads_first(x: torch.Tensor, rows: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Padded rows with the heads first: x [T, Hkv * G, ...], rows [S, n] -> [S * Hkv, n * G, ...]."""
    G = x.shape[1] // kv_heads
    x = x[rows].to(dtype).view(*rows.shape, kv_heads, G, -1)
    return x.permute(0, 2, 1, 3, 4).reshape(len(rows) * kv_heads, rows.shape[1] * G, -1)


def _write_rows(out: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor, inside: torch.Tensor) -> None:
    """The inverse of _heads_first, for the positions that have a row: writes into out [T, H, D], rounded."""
    (S, n), D = rows.shape, out.shape[2]
    grad = grad.view(S, -1, n, grad.shape[1] // n, D).transpose(1, 2).reshape(S, n, -1, D)
    out[rows[inside]] = grad[inside].to(out.dtype)


def attention_bwd_ref(do, q, k, v, o, lse, plan: AttentionPlan, scale: float, rule: AttentionRule = WALK):
    """dq, dk, dv of `attention`. do, q, o [T, Hq, D]; k, v [K, Hkv, D]; lse [T, Hq]."""
    kv_heads, dtype = k.shape[1], lse.dtype
    delta = (do.to(dtype) * o.to(dtype)).contiguous().sum(-1)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    contexts, queries, keys = map(np.asarray, (plan.contexts, plan.query_lengths, plan.lengths))
    starts, key_starts = np.cumsum(queries) - queries, np.cumsum(keys) - keys
    for batch, L in _length_batches(plan):
        first = int(contexts[batch].min()) // QUERY_CHUNK * QUERY_CHUNK
        rows, inside = _padded_rows(starts[batch], contexts[batch], queries[batch], first, L)
        key_rows, key_inside = _padded_rows(key_starts[batch], np.zeros_like(batch), keys[batch], 0, L)
        q_rows, do_rows, lse_rows, delta_rows = (
            _heads_first(x, rows, kv_heads, dtype) for x in (q, do, lse, delta)
        )
        k_rows, v_rows = (_heads_first(x, key_rows, kv_heads, dtype) for x in (k, v))
        lse_rows.view(len(batch), kv_heads, L - first, -1).masked_fill_(
            ~inside[:, None, :, None], float("inf")
        )
        dq_rows, dk_rows, dv_rows = _bwd_group(
            q_rows, k_rows, v_rows, do_rows, lse_rows, delta_rows, scale, first, rule
        )
        _write_rows(dq, dq_rows, rows, inside)
        _write_rows(dk, dk_rows, key_rows, key_inside)
        _write_rows(dv, dv_rows, key_rows, key_inside)
    return dq, dk, dv
