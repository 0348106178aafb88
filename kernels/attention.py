"""Causal grouped-query attention: variable-length prefill, chunked prefill and decode with one arithmetic.

    s_ij = (scale q_i) . k_j   (i - window < j <= i)    p_ij = exp(s_ij - lse_i)    o_i = sum_j p_ij v_j
    delta_i = do_i . o_i     ds_ij = p_ij (do_i . v_j - delta_i)
    dq_i = scale sum_j ds_ij k_j     dk_j = scale sum_i ds_ij q_i     dv_j = sum_i p_ij do_i

With sinks (arXiv:2309.17453; gpt-oss) a row has one logit more, z of its head, whose value is 0:
    lse_i = log(exp(z) + sum_j exp(s_ij))     dz = -sum_i exp(z - lse_i) delta_i
It comes after all keys, joined as a chunk is below, with m = z, l = 1 and acc = 0; A is not added to. The
gradients of q, k and v have the same formulas.
With a cap (Gemma Team, arXiv:2408.00118) the scores are cap t, t = tanh(s / cap); ds has the factor 1 - t^2.
The reference is attention_ref.py. The GPU has attention_triton.py and attention_bwd_triton.py, for chunks
attention_chunks_triton.py and attention_split_triton.py; a CPU with a compiler has attention_cpp.py.

The forward makes two passes over the key tiles of a row (KEY_TILE keys each), in ascending order. The first
pass finds the maximum of all scores. The second pass adds up p and p v, tile by tile. A fully masked tile is
an exact no-op: the maximum stays, and exp(-inf) = 0 adds zeros. So the tiles before a window may be read or
left out: the sums begin with +0.0, which zeros of either sign leave as it is. In a tile that the window cuts,
its hidden keys add zeros too. A tile begins at a multiple of KEY_TILE from the sequence's beginning, never at
the window's.

With chunks (AttentionRule) a row's keys are cut at multiples of `chunk`. Each chunk has its m, l and acc as a
row of its own would. The states are joined in ascending order, from M = -inf, L = 0, A = 0:
    M' = max(M, m)     a = exp(M - M')     b = exp(m - M')     L' = L a + l b     A' = A a + acc b
    o = A / L + 0.0     lse = M + log L
On a GPU (chunk_state_triton.py has its formulas) many programs share the chunks of a row, and samples share
the chunks of their prompt. A chunk whose keys are all hidden has m = -inf, l = 0 and acc = 0. It is an exact
no-op, but for a -0.0 of A, which becomes +0.0. The last addition makes it so for every row. Here a row of one
chunk has the bits of the walk without chunks, but for that. The backward reads o and lse, and is the same.

Shapes: q, o [T, Hq, D]; k, v [K, Hkv, D] with K >= T; lse, sinks and their gradient [T, Hq] in fp32. The
queries of a sequence are its last positions. Key tiles are [tiles, 2, KEY_TILE, D] (0: keys, 1: values).
Roundings: everything is computed in fp32 from the inputs as they are. o, dq, dk and dv are rounded once each.
Order: a row of o depends on its own q, k and v only. Every matrix product has the bits of one fixed shape
(attention_plan.py). The backward takes QUERY_CHUNK positions at a time, counted from the first key of a
sequence. Its shapes depend on the length of the sequence only. Positions without a query add exact zeros.
"""

from collections.abc import Sequence

import torch

from .attention_cpp import attention_bwd, attention_fwd, backward_agrees, forward_agrees, reads_cache
from .attention_plan import KEY_TILE, AttentionPlan
from .attention_ref import attention_bwd_ref, attention_ref, gather_tiles
from .attention_rule import WALK, AttentionRule
from .attention_sinks import check_sinks, sinks_bwd
from .attention_tables import Spans
from .backend import on_cpp, on_triton
from .grad import check_dtype
from .order import ALIGN


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale, rule, sinks):
        o, lse = _packed(q, k, v, plan, scale, rule, want_lse=True, sinks=sinks)
        ctx.save_for_backward(q, k, v, o, lse, *([] if sinks is None else [sinks]))
        ctx.plan, ctx.scale, ctx.rule = plan, scale, rule
        return o

    @staticmethod
    def backward(ctx, do):
        # Read only once: with recompute, the first reading computes them.
        q, k, v, o, lse, *sinks = ctx.saved_tensors
        dsinks = sinks_bwd(do, o, lse, *sinks) if sinks else None
        if on_triton(q):
            from .attention_bwd_triton import attention_bwd as bwd_on_gpu

            grads = bwd_on_gpu(do, q, k, v, o, lse, ctx.plan.on(q.device), ctx.scale, ctx.rule)
            return *grads, None, None, None, dsinks
        operands = do, q, k, v, o, lse, ctx.plan, ctx.scale, ctx.rule
        if on_cpp(q) and not ctx.rule.cap and backward_agrees(ctx.plan, q.shape[-1]):
            return *attention_bwd(*operands), None, None, None, dsinks
        return *attention_bwd_ref(*operands), None, None, None, dsinks


def _packed(
    q, k, v, plan: AttentionPlan, scale: float, rule: AttentionRule, want_lse: bool, sinks=None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if on_triton(q) and rule.chunk:
        from .attention_chunks_triton import walk_packed

        return walk_packed(q, k, v, plan.on(q.device), scale, rule, want_lse, max(plan.lengths), sinks)
    if on_triton(q):
        from .attention_triton import attention_packed

        return attention_packed(q, k, v, plan.on(q.device), scale, want_lse, rule, sinks)
    if on_cpp(q) and forward_agrees(plan.heads, plan.kv_heads, q.shape[-1], rule, sinks is not None):
        return attention_fwd(q, k, v, plan, scale, rule, want_lse, sinks)
    return attention_ref(q, gather_tiles(k, v, plan.rows), plan, scale, rule, want_lse, sinks)


def varlen_plan(
    lengths: Sequence[int], heads: int, kv_heads: int, contexts: Sequence[int] | None = None
) -> AttentionPlan:
    """The plan of `attention` for packed sequences (training), made once and used by every layer.

    lengths [S]: the number of queries of each sequence, all positive.
    contexts [S]: the number of positions before the queries. These positions have keys and values only. None
    means whole sequences, without such positions.
    Raises ValueError for a length or a number of heads that is impossible.
    """
    contexts = [0] * len(lengths) if contexts is None else list(contexts)
    if not len(lengths) or min(lengths) < 1 or len(contexts) != len(lengths) or min(contexts) < 0:
        raise ValueError(
            f"attention: lengths ({list(lengths)}) must be positive, "
            f"contexts ({contexts}) not negative, one each a sequence"
        )
    if heads % kv_heads:
        raise ValueError(f"attention: heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
    return AttentionPlan(tuple(lengths), contexts, None, heads, kv_heads)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    rule: AttentionRule = WALK,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal self-attention of packed sequences. q [T, Hq, D], k, v [K, Hkv, D] -> [T, Hq, D].

    K counts the keys of the contexts too. The keys of a sequence lie together, those of its context first.
    sinks [T, Hq] in fp32 (fp64 for fp64): one logit more of each row (attention_sinks.py); None for none.
    Raises ValueError on a bad shape or dtype.
    """
    check_dtype("attention", q=q, k=k, v=v)
    T, K, D = sum(plan.query_lengths), sum(plan.lengths), q.shape[-1]
    if q.shape != (T, plan.heads, D) or k.shape != (K, plan.kv_heads, D) or v.shape != k.shape:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be "
            f"[{T}, {plan.heads}, D], [{K}, {plan.kv_heads}, D] twice, as planned"
        )
    check_head_dim(D)
    check_sinks(sinks, q)
    if not torch.is_grad_enabled():
        return _packed(q, k, v, plan, scale, rule, want_lse=False, sinks=sinks)[0]
    return _Attention.apply(q, k, v, plan, scale, rule, sinks)


def attention_cached(
    q: torch.Tensor,
    tiles: torch.Tensor,
    plan: AttentionPlan | Spans,
    scale: float,
    rule: AttentionRule = WALK,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of new tokens against a cache that already holds their keys and values; forward only.

    q [T, Hq, D], tiles [blocks * Hkv, 2, KEY_TILE, D] -> [T, Hq, D]. The bits are those of `attention`.
    sinks: as there.
    Spans instead of a plan serve Triton only: their tensors lie on the device already.
    Tiles may be in a narrower dtype than q. They are converted as they are read, which is exact.
    Raises ValueError on a bad shape or dtype.
    """
    check_dtype("attention_cached", q=q)
    check_dtype("attention_cached", tiles=tiles)
    if tiles.dtype != q.dtype and tiles.dtype.itemsize >= q.dtype.itemsize:
        raise ValueError(
            f"attention_cached: tiles.dtype ({tiles.dtype}) must be q.dtype ({q.dtype}) "
            "or a narrower one; convert one of them"
        )
    check_head_dim(q.shape[-1])
    if tiles.shape[1:] != (2, KEY_TILE, q.shape[-1]):
        raise ValueError(
            f"attention_cached: tiles {tuple(tiles.shape)} must be [tiles, 2, {KEY_TILE}, {q.shape[-1]}]"
        )
    check_sinks(sinks, q)
    if on_triton(q):
        spans = plan if isinstance(plan, Spans) else plan.on(q.device)
        blocks = tiles.view(-1, spans.kv_heads, 2, KEY_TILE, q.shape[-1])
        k, v = blocks.permute(2, 0, 3, 1, 4)  # [blocks, KEY_TILE, Hkv, D] each
        return _paged_on_triton(q, k, v, spans, scale, rule, sinks)
    agrees = on_cpp(q) and forward_agrees(plan.heads, plan.kv_heads, q.shape[-1], rule, sinks is not None)
    if agrees and reads_cache(q, tiles, plan):
        return attention_fwd(q, tiles, tiles, plan, scale, rule, want_lse=False, sinks=sinks)[0]
    return attention_ref(q, tiles, plan, scale, rule, want_lse=False, sinks=sinks)[0]


def check_head_dim(D: int) -> None:
    """Raise ValueError unless matrix products of width D are row-invariant (see order.ALIGN)."""
    if D % ALIGN:
        raise ValueError(f"attention: head_dim ({D}) must be a multiple of {ALIGN}")


def _paged_on_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, scale: float, rule: AttentionRule, sinks
) -> torch.Tensor:
    """q [T, Hq, D], k and v [blocks, KEY_TILE, Hkv, D] -> [T, Hq, D]. Which kernel serves decides no bit."""
    if not rule.chunk:
        from .attention_triton import attention_paged

        return attention_paged(q, k, v, spans, scale, rule, sinks)
    if len(q) == len(spans.seqused_k):  # one token of each sequence
        from .attention_split_triton import split_paged

        return split_paged(q, k, v, spans, scale, rule, sinks)
    from .attention_chunks_triton import walk_paged

    return walk_paged(q, k, v, spans, scale, rule, sinks)
