"""Causal grouped-query attention: variable-length prefill, chunked prefill and decode with one arithmetic.

    s_ij = (scale q_i) . k_j   (j <= i)      p_ij = exp(s_ij - lse_i)      o_i = sum_j p_ij v_j
    delta_i = do_i . o_i     ds_ij = p_ij (do_i . v_j - delta_i)
    dq_i = scale sum_j ds_ij k_j     dk_j = scale sum_i ds_ij q_i     dv_j = sum_i p_ij do_i

Two passes over a row's key tiles of KEY_TILE, in ascending order: the maximum of all scores, then the sums of
p and of p v tile by tile. A fully masked tile is an exact no-op: the maximum stays, and exp(-inf) = 0 adds
zeros.

q, o [T, Hq, D]; k, v [K, Hkv, D], K >= T: a sequence's queries are its last positions; lse [T, Hq] in fp32;
key tiles [tiles, 2, KEY_TILE, D] (0: keys, 1: values). Roundings: everything in fp32 from the inputs as they
are; o, dq, dk, dv once each. On a GPU: attention_triton.py, attention_bwd_triton.py. What follows is the
reference. Order: a row of o depends on its own q, k and v only, and every matrix product has the bits of one
fixed shape (attention_plan.py). The backward runs over QUERY_CHUNK positions at a time, counted from a
sequence's first key; its shapes depend on the sequence's length only, and positions without a query add exact
zeros.
"""

from collections.abc import Sequence

import numpy as np
import torch

from .attention_plan import KEY_TILE, AttentionPlan
from .backend import on_triton
from .grad import accumulate_dtype, check_dtype
from .order import ALIGN

# Positions of one step of the backward: bounds its score matrix and skips most keys after the queries. A
# constant, as it orders dk and dv.
QUERY_CHUNK = 32
# Elements of a score matrix in the backward. Bounds memory only: it decides how many sequences go in one
# call.
SCORE_ELEMENTS = 1 << 22


def attention_ref(
    q: torch.Tensor, tiles: torch.Tensor, plan: AttentionPlan, scale: float, want_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Forward only.

    q [T, Hq, D], tiles [tiles, 2, KEY_TILE, D]. Returns o like q, and lse [T, Hq] in fp32 where it is wanted.
    """
    T, H, D = q.shape
    acc_dtype = accumulate_dtype(q.dtype)
    index = plan.index(D, acc_dtype)
    rows = q.reshape(T * H, D).index_select(0, index.rows).to(acc_dtype).view(-1, index.tile_rows, D)
    rows *= scale
    o = torch.empty_like(rows)
    lse = rows.new_empty(*rows.shape[:2], 1)
    for g in index.groups:
        at = slice(g.start, g.start + g.bias.shape[0])
        m, l, acc = _group_ref(rows[at], tiles.index_select(0, g.tiles).to(acc_dtype), g.bias)
        torch.div(acc, l, out=o[at])
        if want_lse:
            torch.add(m, l.log_(), out=lse[at])
    o = o.to(q.dtype).view(-1, D).index_select(0, index.inverse).view(T, H, D)
    return o, lse.view(-1).index_select(0, index.inverse).view(T, H) if want_lse else None


def _group_ref(
    q: torch.Tensor, kv: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m, l [c, R, 1] and the unnormalised output [c, R, D].

    q [c, R, D] scaled, kv [c * J, 2, KEY_TILE, D], bias [c, M, R, KEY_TILE].
    """
    c, R, D = q.shape
    kv = kv.view(c, -1, 2, KEY_TILE, D)
    J = kv.shape[1]
    k = kv.view(c * J, 2, KEY_TILE, D)[:, 0].transpose(1, 2)
    s = torch.bmm(q.unsqueeze(1).expand(c, J, R, D).reshape(c * J, R, D), k).view(c, J, R, KEY_TILE)
    s[:, J - bias.shape[1] :] += bias
    m = s.amax(-1, keepdim=True).amax(1)
    p = s.sub_(m.unsqueeze(1)).exp_()
    l = p.sum(-1, keepdim=True).cumsum(1)[:, -1]
    acc = torch.zeros_like(
        q
    )  # begun with +0.0, so that adding a hidden tile's zeros never turns a -0.0 around
    for j in range(J):
        acc.baddbmm_(p[:, j], kv[:, j, 1])
    return m, l, acc


def gather_tiles(k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Key tiles of packed keys and values, in fp32, as each is read many times.

    k, v [K, Hkv, D], rows [blocks, KEY_TILE] -> [blocks * Hkv, 2, KEY_TILE, D].
    """
    kv = torch.stack([k, v], dim=1).to(accumulate_dtype(k.dtype))[rows]  # [blocks, KEY_TILE, 2, Hkv, D]
    return kv.permute(0, 3, 2, 1, 4).reshape(-1, 2, KEY_TILE, k.shape[-1])


def _bwd_group(q, k, v, do, lse, delta, scale, first):
    """Gradients of sequences padded to one length L, whose rows of q begin with position `first`, a multiple
    of QUERY_CHUNK.

    q, do [S * Hkv, (L - first) * G, D], k, v [S * Hkv, L, D], lse, delta [S * Hkv, (L - first) * G, 1]. Rows
    that stand for no query have lse = inf, so that their p is 0.
    """
    L = k.shape[1]
    G = q.shape[1] // (L - first)
    q = q * scale
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for a in range(first, L, QUERY_CHUNK):
        b = min(a + QUERY_CHUNK, L)
        at = slice((a - first) * G, (b - first) * G)
        later = torch.arange(b) > torch.arange(a, b).repeat_interleave(G).unsqueeze(1)  # keys after the query
        p = torch.bmm(q[:, at], k[:, :b].transpose(1, 2)).sub_(lse[:, at]).exp_().masked_fill_(later, 0.0)
        ds = torch.bmm(do[:, at], v[:, :b].transpose(1, 2)).sub_(delta[:, at]).mul_(p)
        dv[:, :b] += torch.bmm(p.transpose(1, 2), do[:, at])
        dk[:, :b] += torch.bmm(ds.transpose(1, 2), q[:, at])
        torch.bmm(ds, k[:, :b], out=dq[:, at])
    return dq.mul_(scale), dk, dv


def _padded(
    starts: np.ndarray, before: np.ndarray, counts: np.ndarray, first: int, L: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions first .. L - 1 of S sequences, of which `counts` have a row, after `before` that have none:
    [S, L - first].

    Returns the packed row of each (one of the sequence's own where it has none), and whether it has one.
    """
    within = np.arange(first, L) - before[:, None]
    inside = (within >= 0) & (within < counts[:, None])
    return torch.from_numpy(starts[:, None] + within.clip(0, counts[:, None] - 1)), torch.from_numpy(inside)


def attention_bwd_ref(do, q, k, v, o, lse, plan: AttentionPlan, scale: float):
    """dq, dk, dv of `attention`. do, q, o [T, Hq, D], k, v [K, Hkv, D], lse [T, Hq]."""
    H, (Hkv, D) = q.shape[1], k.shape[1:]
    G = H // Hkv
    acc_dtype = lse.dtype
    delta = (do.to(acc_dtype) * o.to(acc_dtype)).sum(-1)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    contexts, queries, keys = (
        np.asarray(plan.contexts),
        np.asarray(plan.query_lengths),
        np.asarray(plan.lengths),
    )
    starts, key_starts = np.cumsum(queries) - queries, np.cumsum(keys) - keys
    padded = -(-keys // ALIGN) * ALIGN

    def heads_first(x, rows, heads):  # [T, Hkv * heads, ...], rows [S, n] -> [S * Hkv, n * heads, ...]
        x = x[rows].to(acc_dtype).view(*rows.shape, Hkv, heads, -1)
        return x.permute(0, 2, 1, 3, 4).reshape(len(rows) * Hkv, rows.shape[1] * heads, -1)

    def put(out, grad, rows, inside):  # heads_first's inverse
        S, n = rows.shape
        grad = grad.view(S, Hkv, n, -1, D).transpose(1, 2).reshape(S, n, -1, D)
        out[rows[inside]] = grad[inside].to(out.dtype)

    for L in np.unique(padded):
        L = int(L)
        members = np.flatnonzero(padded == L)
        at_once = max(1, SCORE_ELEMENTS // (H * min(L, QUERY_CHUNK) * L))
        for i in range(0, len(members), at_once):
            some = members[i : i + at_once]
            first = int(contexts[some].min()) // QUERY_CHUNK * QUERY_CHUNK
            rows, inside = _padded(starts[some], contexts[some], queries[some], first, L)
            key_rows, key_inside = _padded(key_starts[some], np.zeros_like(some), keys[some], 0, L)
            lse_rows = heads_first(lse, rows, G)
            lse_rows.view(len(some), Hkv, L - first, G).masked_fill_(~inside[:, None, :, None], float("inf"))
            grads = _bwd_group(
                heads_first(q, rows, G),
                heads_first(k, key_rows, 1),
                heads_first(v, key_rows, 1),
                heads_first(do, rows, G),
                lse_rows,
                heads_first(delta, rows, G),
                scale,
                first,
            )
            put(dq, grads[0], rows, inside)
            put(dk, grads[1], key_rows, key_inside)
            put(dv, grads[2], key_rows, key_inside)
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        o, lse = _packed(q, k, v, plan, scale, want_lse=True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.plan, ctx.scale = plan, scale
        return o

    @staticmethod
    def backward(ctx, do):
        q = ctx.saved_tensors[0]
        if on_triton(q):
            from .attention_bwd_triton import attention_bwd

            return *attention_bwd(do, *ctx.saved_tensors, ctx.plan.on(q.device), ctx.scale), None, None
        return *attention_bwd_ref(do, *ctx.saved_tensors, ctx.plan, ctx.scale), None, None


def _packed(
    q, k, v, plan: AttentionPlan, scale: float, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if on_triton(q):
        from .attention_triton import attention_packed

        return attention_packed(q, k, v, plan.on(q.device), scale, want_lse)
    return attention_ref(q, gather_tiles(k, v, plan.rows), plan, scale, want_lse)


def varlen_plan(
    lengths: Sequence[int], heads: int, kv_heads: int, contexts: Sequence[int] | None = None
) -> AttentionPlan:
    """Packed sequences: the plan of `attention` for training, made once and used by every layer.

    lengths [S]: queries of each sequence, all positive. contexts [S]: positions before them, of which there
    are keys and values only; None: whole sequences. Raises ValueError for a length or a number of heads that
    cannot be.
    """
    contexts = [0] * len(lengths) if contexts is None else list(contexts)
    if not len(lengths) or min(lengths) < 1 or len(contexts) != len(lengths) or min(contexts) < 0:
        raise ValueError(
            f"attention: lengths ({list(lengths)}) must be positive, contexts ({contexts}) not negative, one each a sequence"
        )
    if heads % kv_heads:
        raise ValueError(f"attention: heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
    return AttentionPlan(tuple(lengths), contexts, None, heads, kv_heads)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Causal self-attention of packed sequences. q [T, Hq, D], k, v [K, Hkv, D] -> [T, Hq, D]. Raises
    ValueError.

    K counts the keys of the contexts too: each sequence's lie together, its context's first.
    """
    check_dtype("attention", q=q, k=k, v=v)
    T, K, D = sum(plan.query_lengths), sum(plan.lengths), q.shape[-1]
    if q.shape != (T, plan.heads, D) or k.shape != (K, plan.kv_heads, D) or v.shape != k.shape:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be [{T}, {plan.heads}, D], "
            f"[{K}, {plan.kv_heads}, D] twice, as planned"
        )
    check_head_dim(D)
    if not torch.is_grad_enabled():
        return _packed(q, k, v, plan, scale, want_lse=False)[0]
    return _Attention.apply(q, k, v, plan, scale)


def attention_cached(q: torch.Tensor, tiles: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """Attention of new tokens against a cache that already holds their keys and values; forward only.

    q [T, Hq, D], tiles [blocks * Hkv, 2, KEY_TILE, D] -> [T, Hq, D]. The bits are those of `attention`.
    Raises ValueError. Tiles may be in a narrower dtype than q: they are converted as they are read, which is
    exact.
    """
    check_dtype("attention_cached", q=q)
    check_dtype("attention_cached", tiles=tiles)
    if tiles.dtype != q.dtype and tiles.dtype.itemsize >= q.dtype.itemsize:
        raise ValueError(
            f"attention_cached: tiles.dtype ({tiles.dtype}) must be q.dtype ({q.dtype}) or a narrower one; convert one of them"
        )
    check_head_dim(q.shape[-1])
    if tiles.shape[1:] != (2, KEY_TILE, q.shape[-1]):
        raise ValueError(
            f"attention_cached: tiles {tuple(tiles.shape)} must be [tiles, 2, {KEY_TILE}, {q.shape[-1]}]"
        )
    if on_triton(q):
        from .attention_triton import attention_paged

        spans = plan.on(q.device)
        k, v = tiles.view(-1, spans.kv_heads, 2, KEY_TILE, q.shape[-1]).permute(
            2, 0, 3, 1, 4
        )  # each [blocks, KEY_TILE, Hkv, D]
        return attention_paged(q, k, v, spans, scale)
    return attention_ref(q, tiles, plan, scale, want_lse=False)[0]


def check_head_dim(D: int) -> None:
    """Raise ValueError unless matrix products of width D are row-invariant (see order.ALIGN)."""
    if D % ALIGN:
        raise ValueError(f"attention: head_dim ({D}) must be a multiple of {ALIGN}")
