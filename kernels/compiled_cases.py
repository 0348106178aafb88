"""Every Triton kernel with every configuration that is launched at the shapes of the supported models.

A case has a name, and calls the launchers with meta tensors. A recording of the case
(launch.recorded_launches) gives the launches, constants and options of a real run. So this list cannot drift
from the code that launches. One case for each binary is enough: for example, Triton compiles once for all
integers that are multiples of 16. Every launch of all cases has its own name. tests/triton/launches.py
compares this list with the launches of whole runs. verify/binaries.py compiles the list.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch

from .adamw import AdamW
from .adamw_triton import adamw
from .add_shared_triton import add_shared_bwd, add_shared_fwd
from .attention_bwd_triton import attention_bwd
from .attention_chunks_triton import walk_packed, walk_paged
from .attention_plan import KEY_TILE
from .attention_rule import RULES, WALK, AttentionRule
from .attention_sinks_triton import sinks_bwd
from .attention_split_triton import no_chunks, split_paged
from .attention_tables import Spans
from .attention_triton import attention_packed, attention_paged
from .block_digest import BLOCK, LANES
from .block_digest_triton import block_digests
from .causal_conv_triton import causal_conv_bwd, causal_conv_fwd
from .clamped_swiglu_triton import clamped_swiglu_bwd, clamped_swiglu_fwd
from .columns_triton import NORM_ROWS, add_all_partials, add_partials, bias_columns
from .combine_experts_triton import add_bias_dots, combine_bwd
from .decode_heads_triton import heads_to_cache
from .delta_bwd_triton import delta_bwd
from .delta_rows_triton import PreparedRows
from .delta_walk_triton import delta_pairs, delta_walk
from .draw_triton import draw_tokens
from .embedding_triton import embedding_bwd, sorted_ids
from .expert_columns_triton import add_expert_columns
from .expert_rows_triton import ExpertTables, rows_of_tokens, runs_of_experts, sort_slots, sum_slots
from .gated_norm_triton import gated_norm_bwd, gated_norm_fwd
from .gelu_mul_triton import gelu_mul_bwd, gelu_mul_fwd
from .given_softmax_triton import given_weights
from .grad import GradBuffer
from .grouped_linear_triton import add_expert_runs, grouped_matmul
from .launch import Launch, recorded_launches
from .leaves import Leaves
from .logprob_triton import logprob_bwd, logprob_fwd
from .matmul_leaves_triton import matmul_leaves
from .matmul_triton import add_outer, matmul
from .merge_triton import merge
from .order import TOKEN_BLOCK, Runs, token_blocks
from .partial_sums import PartialSums
from .philox_triton import uniforms
from .qk_norm_triton import qk_norm_bwd, qk_norm_fwd
from .recurrent_state import RecurrentState, SegmentTables, StateShape
from .rms_norm_triton import rms_norm_bwd, rms_norm_fwd
from .rope_triton import rotate
from .sigmoid_router_triton import choose, weigh, weigh_bwd
from .silu_mul_triton import silu_mul_bwd, silu_mul_fwd
from .softcap_triton import softcap_fwd
from .tiles import tiles_of_target
from .topk_softmax_triton import topk_softmax_bwd, topk_softmax_fwd
from .value_head_triton import value_head_bwd, value_head_fwd

BF16, FP16, FP32 = DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Head widths and groups of the supported models: Qwen3-0.6B and 1.7B, 8B, 30B-A3B, Qwen2.5-0.5B,
# Llama-3.2-1B, SmolLM2-135M.
ATTENTION_SHAPES = ((128, 2), (128, 4), (128, 8), (64, 7), (64, 4), (64, 3))
# A layer of OLMo-3-7B, and one of Gemma-2-9B with the widest heads. Those in fp32 spill on AMD.
RULED_SHAPES = (
    (BF16, 128, 1, AttentionRule(window=4096)),
    (FP32, 128, 1, AttentionRule(window=4096)),
    (BF16, 256, 2, AttentionRule(window=4096, cap=50.0)),
)
# Layers of gpt-oss, whose rows have sinks. In fp16 they are those of bf16, but for the type.
SINK_SHAPES = (
    (BF16, 64, 8, WALK),
    (BF16, 64, 8, AttentionRule(window=128)),
    (FP32, 64, 8, AttentionRule(window=128)),
)
# Rows of a decode and of a prefill. Their products have different row tiles.
_ROWS = {"decode": 64, "prefill": 128}
# Rows whose 16-bit products go through TMA on Hopper.
_MANY_ROWS = 8192
# Tokens whose experts have few rows and many (tiles.grouped_rows).
_TOKENS_OF_EXPERTS = {"decode": 64, "prefill": 4096}
_EXPERTS = 128, 8, 2048, 768  # experts, those of a token, hidden size, and size of an expert
_CLAMPED_EXPERTS = 128, 4, 2880  # gpt-oss-120B's; the hidden size is that of an expert, too
_DELTA_NET = StateShape(16, 32, 128, 128)  # of Qwen3-Next and Qwen3.5
_BLOCKS = token_blocks([256])
Case = tuple[str, Callable[[], object]]


def configurations(target: str = "sm_90") -> Iterator[tuple[str, Launch]]:
    """The name and the launch of every configuration on a target.

    The name is made of the names of the case and of the kernel.
    """
    for name, run in cases():
        with tiles_of_target(target), recorded_launches() as launches:
            run()
        assert launches, f"case {name!r} launched nothing"
        for launch in launches:
            yield f"{name}: {launch.kernel.__name__.lstrip('_')}", launch


def cases() -> Iterator[Case]:
    """All cases, kernel by kernel."""
    yield "norms together", _norms_together
    for phase, T in _TOKENS_OF_EXPERTS.items():
        yield f"rows of experts {phase}", lambda T=T: sort_slots(_meta(torch.int64, T, 8), 128)
    yield "rows of experts in sequences", lambda: runs_of_experts(_rows(256), _meta(torch.int32, 4, 2))
    for E, k in ((128, 8), (8, 2)):
        yield f"given experts, {k} of {E}", lambda E=E, k=k: _given(E, k)
    for E, k, groups in ((128, 8, 1), (256, 8, 8)):  # of GLM-4.5-Air and of DeepSeek-V3
        what = f"sigmoid router, {k} of {E} in {groups} groups"
        yield what, lambda E=E, k=k, groups=groups: _sigmoid_router(E, k, groups)
    for dtype in DTYPES:
        yield from _elementwise(dtype)
        yield from _products(dtype)
        yield from _attention(dtype)
        yield from _experts(dtype)
        yield from _clamped_experts(dtype)
    for rows in (*_ROWS.values(), _MANY_ROWS):  # another BLOCK_K on some generations
        square = f"bfloat16 {rows} rows, 2048 x 2048"
        yield (
            f"linear {square}",
            lambda rows=rows: matmul(_meta(BF16, rows, 2048), _meta(BF16, 2048, 2048)),
        )
        yield (
            f"input gradient {square}",
            lambda rows=rows: matmul(_meta(BF16, rows, 2048), _transposed(BF16, 2048, 2048)),
        )
    for cache_dtype in (BF16, FP16):
        for D, group in ATTENTION_SHAPES:
            name = f"attention float32 {D}, groups of {group}, paged in {_name(cache_dtype)}"
            yield name, lambda D=D, group=group, cache_dtype=cache_dtype: _paged(FP32, cache_dtype, D, group)
    yield from _logprob()
    for dtype in DTYPES:
        yield f"softcap {_name(dtype)}", lambda dtype=dtype: softcap_fwd(_meta(dtype, 64, 4096), 30.0)
        yield from _chunked_attention(dtype, *ATTENTION_SHAPES[0])
        q, row = _meta(dtype, 256, 64, 64), _meta(FP32, 256, 64)
        yield f"gradient of sinks {_name(dtype)}", lambda q=q, row=row: sinks_bwd(q, q, row, row)
    for shape in SINK_SHAPES:
        yield from _attention_of(*shape, wants_lse=(True,), sinks=True)
    yield from _chunked_attention(*SINK_SHAPES[0][:3], sinks=True)
    for shape in RULED_SHAPES:
        yield from _attention_of(*shape, wants_lse=(True,))
    blocks, keys = _meta(torch.int64, 8, 2), _meta(torch.int64, LANES, BLOCK)
    for dtype in (FP32, BF16):  # any dtype of 4 bytes, and any of 2
        yield (
            f"digests of {8 * dtype.itemsize} bits",
            lambda dtype=dtype: block_digests(_meta(dtype, 1 << 18), blocks, keys),
        )
    for dtype in (None, BF16, FP16):
        suffix = f", {_name(dtype)} weights" if dtype else ""
        yield f"adamw{suffix}", lambda dtype=dtype: _adamw(dtype)
    for base, dtype in product(DTYPES, DTYPES):
        name = f"merge of {_name(base)} into {_name(dtype)}"
        yield name, lambda base=base, dtype=dtype: _merge(base, dtype)
    yield from _adapters_of_experts()
    # In other dtypes they are the same, but for the type of what they read and write.
    yield from _delta_net(BF16)
    yield "uniforms", lambda: uniforms(_meta(torch.int64, 4, 64), 1, 0)


def _merge(base: torch.dtype, dtype: torch.dtype) -> None:
    b, a = _meta(FP32, 2048, 16), _meta(FP32, 16, 1024)
    merge(_meta(dtype, 2048, 1024), _meta(base, 2048, 1024), b, a, 2.0)


def _adapters_of_experts() -> Iterator[Case]:
    """The product of LoRA's gradients that no other weight has.

    All others have the binaries of weights, of experts and of one matrix: a rank that is no multiple of 16 is
    padded to one (low_rank.padded_rank).
    """
    x, a = _meta(FP32, 256, 2048), _meta(FP32, 128, 2, 16, 2048)[:, 0]
    yield "adapters of experts", lambda: grouped_matmul(x, a, _rows(32), x_of_tokens=False)


def _delta_net(dtype: torch.dtype) -> Iterator[Case]:
    """A gated delta net: over slots, and the backward."""
    s, T, S, name = _DELTA_NET, 256, 2, _name(dtype)
    state = RecurrentState(s, S, dtype, torch.device("meta"))
    tables = SegmentTables(*(_meta(torch.int32, *size) for size in ((S, 5), (2 * S,), (T, 2))))
    qkv, conv, gate = _meta(dtype, T, s.channels), _meta(dtype, s.channels, 1, 4), _meta(dtype, T, s.heads)
    o, weight, norm = _meta(dtype, T, s.heads, s.V), _meta(dtype, s.heads), _meta(dtype, s.V)

    def rule() -> None:
        x = PreparedRows(qkv, gate, gate, weight, weight, tables, s, state)
        delta_walk(x, pairs := delta_pairs(x), state.tensors["u"], state.tensors["start"], False)
        x.keep()
        delta_bwd(o, gate, gate, weight, weight, x, pairs, state.tensors["u"], state.tensors["start"])

    yield f"causal conv {name}", lambda: causal_conv_fwd(qkv, conv, tables, state)
    yield f"causal conv backward {name}", lambda: causal_conv_bwd(qkv, qkv, conv, tables, _BLOCKS)
    yield f"delta rule {name}", rule
    yield f"gated norm {name}", lambda: gated_norm_fwd(o, o, norm, 1e-6)
    yield f"gated norm backward {name}", lambda: gated_norm_bwd(o, o, o, norm, 1e-6, _BLOCKS)


def _meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _transposed(dtype: torch.dtype, N: int, K: int) -> torch.Tensor:
    """A [N, K] view of a contiguous [K, N], as the products of input gradients read a weight."""
    return _meta(dtype, K, N).t()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _elementwise(dtype: torch.dtype) -> Iterator[Case]:
    """Column sums, norms, silu_mul, rope and the gradient of the embedding."""
    name, D = _name(dtype), 1024  # any multiple of 16 gives the same binary
    yield f"columns {name}", lambda: _columns(dtype, D)
    for D in (1024, 2048, 4096):  # the widths of the models, rounded up to tiles
        yield f"rms_norm {name} {D}", lambda D=D: _norm(dtype, D, with_residual=False)
        yield f"add_rms_norm {name} {D}", lambda D=D: _norm(dtype, D, with_residual=True)
        yield f"value_head {name} {D}", lambda D=D: _value_head(dtype, D)
    for heads, kv_heads in ((16, 8), (32, 8)):  # Qwen3's
        yield f"qk_norm {name}, {heads} heads", lambda H=heads, kv=kv_heads: _heads(dtype, H, kv)
    caches = DTYPES if dtype == FP32 else (dtype,)
    for cache, (D, has_norm) in product(caches, ((128, True), (128, False), (64, False))):
        what = f"heads{' with qk_norm' if has_norm else ''} {name} D={D}, cache in {_name(cache)}"
        yield what, lambda c=cache, D=D, norm=has_norm: _decoded_heads(dtype, c, D, norm)
    gate_up = _meta(dtype, 256, 6144)
    yield f"silu_mul {name}", lambda: silu_mul_bwd(silu_mul_fwd(gate_up), gate_up)
    e, z = _meta(dtype, 256, D), _meta(dtype, 256, 1)
    yield f"add_shared {name}", lambda: add_shared_bwd(add_shared_fwd(e, e, z), e, z)
    yield f"gelu_mul {name}", lambda: gelu_mul_bwd(gelu_mul_fwd(gate_up), gate_up)
    for D in (64, 128):
        x, cos = _meta(dtype, 256, 24, D), _meta(FP32, 256, D // 2)
        yield f"rope {name} D={D}", lambda x=x, cos=cos: rotate(x, cos, cos, inverse=False)
        yield f"rope backward {name} D={D}", lambda x=x, cos=cos: rotate(x, cos, cos, inverse=True)
    ids, dx = _meta(torch.int64, 256), _meta(dtype, 256, 1024)
    yield f"embedding {name}", lambda: embedding_bwd(_meta(FP32, 1000, 1024), sorted_ids(ids), dx)


def _columns(dtype: torch.dtype, D: int) -> None:
    """Of one bias, and of two together."""
    acc, partial = _meta(FP32, 1, D), bias_columns(_meta(dtype, 256, D), _BLOCKS)
    add_partials(acc, partial, _BLOCKS, TOKEN_BLOCK)
    add_all_partials([PartialSums(acc, partial, _BLOCKS, TOKEN_BLOCK)] * 2)


def _norms_together() -> None:
    """The last sums of two norms, by one launch."""
    acc, partial = _meta(FP32, 1, 1024), _meta(FP32, 2 * TOKEN_BLOCK // NORM_ROWS, 1024)
    add_all_partials([PartialSums(acc, partial, _BLOCKS, NORM_ROWS)] * 2)


def _norm(dtype: torch.dtype, D: int, with_residual: bool) -> None:
    x, w = _meta(dtype, 256, D), _meta(dtype, D)
    y, r, s = rms_norm_fwd(x, w, 1e-6, x if with_residual else None)
    _, partial = rms_norm_bwd(y, s, w, r, _BLOCKS, y if with_residual else None)
    add_partials(_meta(FP32, 1, D), partial, _BLOCKS, NORM_ROWS)


def _value_head(dtype: torch.dtype, D: int) -> None:
    h, w = _meta(dtype, 256, D), _meta(dtype, D)
    value_head_bwd(value_head_fwd(h, w), h, h, w, _BLOCKS)


def _decoded_heads(dtype: torch.dtype, cache: torch.dtype, D: int, has_norm: bool) -> None:
    qkv, w, cos = _meta(dtype, 64, 32, D), _meta(dtype, D), _meta(FP32, 64, D // 2)
    pages, place = _meta(cache, 64 * 8, 2, KEY_TILE, D), _meta(torch.int64, 64)
    heads_to_cache(qkv, (w, w) if has_norm else None, 1e-6, cos, cos, 16, pages, place, place)


def _heads(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    x, w = _meta(dtype, 256, heads + kv_heads, 128), _meta(dtype, 128)
    y, r = qk_norm_fwd(x, w, w, heads, 1e-6)
    _, partials = qk_norm_bwd(y, x, w, w, r, heads, _BLOCKS)
    add_partials(_meta(FP32, 1, 128), partials[0], _BLOCKS, NORM_ROWS)


def _adamw(dtype: torch.dtype | None) -> None:
    state = [_meta(FP32, 4096) for _ in range(4)]
    adamw(*state, AdamW(1.0, 1e-4, 0.9, 0.95, 0.1, 0.05, 1e-8), dtype and _meta(dtype, 4096))


def _products(dtype: torch.dtype) -> Iterator[Case]:
    """Forward products (also with a bias, and with uneven widths), input gradients and weight gradients."""
    name = _name(dtype)
    for phase, rows in _ROWS.items():
        x, bias = _meta(dtype, rows, 2048), _meta(dtype, 1024)
        forward, backward = _meta(dtype, 1024, 2048), _transposed(dtype, 1024, 2048)
        yield f"linear {name} {phase}", lambda x=x, w=forward: matmul(x, w)
        yield f"input gradient {name} {phase}", lambda x=x, w=backward: matmul(x, w)
        suffix = ", decode" if phase == "decode" else ""
        yield f"linear {name} with a bias{suffix}", lambda x=x, w=forward, b=bias: matmul(x, w, b)
        x, uneven = _meta(dtype, rows, 1008), _meta(dtype, 1008, 1008)
        yield f"linear {name} uneven{suffix}", lambda x=x, w=uneven: matmul(x, w)
    for N, K in ((1024, 2048), (4096, 1024)):  # few tiles, and enough for every multiprocessor
        dy, x, acc = _meta(dtype, 256, N), _meta(dtype, 256, K), _meta(FP32, 1, N, K)
        for suffix, empty in (("", False), (", into an empty buffer", True)):
            yield (
                f"weight gradient {name}, {N} x {K}{suffix}",
                lambda dy=dy, x=x, acc=acc, empty=empty: add_outer(acc, dy, x, _BLOCKS, empty),
            )
    if dtype != FP16:
        yield from _products_by_leaves(dtype)
    if dtype != FP32:
        yield from _products_of_many_rows(dtype)
        yield from _unrounded_products(dtype)
        yield from _decoding_of_wide_outputs(dtype)


def _products_by_leaves(dtype: torch.dtype) -> Iterator[Case]:
    """Those whose K is cut (leaves.py): o and down; and the input gradients of qkv and of gate_up.

    In fp16 they are those of bf16, but for the type.
    """
    name, rows = _name(dtype), _ROWS["prefill"]
    x, w, dx = _meta(dtype, rows, 2048), _meta(dtype, 1024, 2048), _transposed(dtype, 1024, 2048)
    yield f"linear {name} by leaves prefill", lambda: matmul_leaves(x, w, 8, (2048,))
    qkv = 1024, 512, 512
    yield f"input gradient {name} by leaves of three parts", lambda: matmul_leaves(x, dx, 8, qkv)
    if dtype == BF16:
        few, wide = _meta(dtype, _ROWS["decode"], 2048), _transposed(dtype, 2048, 2048)
        yield f"linear {name} by leaves decode", lambda: matmul_leaves(few, w, 8, (2048,))
        # Another BLOCK_K, which no piece fills.
        yield f"input gradient {name} by leaves, 2048 x 2048", lambda: matmul_leaves(x, wide, 8, qkv)


def _products_of_many_rows(dtype: torch.dtype) -> Iterator[Case]:
    name, bias = _name(dtype), _meta(dtype, 2048)
    x, w = _meta(dtype, _MANY_ROWS, 1024), _meta(dtype, 2048, 1024)
    yield f"linear {name} many rows", lambda: matmul(x, w)
    yield f"linear {name} many rows with a bias", lambda: matmul(x, w, bias)
    yield f"input gradient {name} many rows", lambda: matmul(x, _transposed(dtype, 2048, 1024))


def _unrounded_products(dtype: torch.dtype) -> Iterator[Case]:
    """Those with weights whose adapters are not merged (linear.Adapted)."""
    name, w, dy = _name(dtype), _meta(dtype, 1024, 2048), _meta(dtype, _ROWS["prefill"], 1024)
    for phase, rows in _ROWS.items():
        x = _meta(dtype, rows, 2048)
        yield f"linear {name} unrounded {phase}", lambda x=x: matmul(x, w, rounded=False)
    yield f"input gradient {name} unrounded", lambda: matmul(dy, w.t(), rounded=False)


def _decoding_of_wide_outputs(dtype: torch.dtype) -> Iterator[Case]:
    """Products of few rows, whose tiles on Hopper depend on the outputs."""
    for N in (4096, 8192):
        x, w = _meta(dtype, 64, 1024), _meta(dtype, N, 1024)
        yield f"linear {_name(dtype)} decode, N {N}", lambda x=x, w=w: matmul(x, w)
        w = _transposed(dtype, N, 1024)
        yield f"input gradient {_name(dtype)} decode, N {N}", lambda x=x, w=w: matmul(x, w)
    for N in (4096, 12288) if dtype == BF16 else ():  # another BLOCK_K
        x, w = _meta(dtype, 64, 2048), _meta(dtype, N, 2048)
        yield f"linear {_name(dtype)} decode, {N} x 2048", lambda x=x, w=w: matmul(x, w)
    if dtype == BF16:  # of o in Qwen3-30B-A3B
        w = _transposed(dtype, 4096, 2048)
        yield f"input gradient {_name(dtype)} decode, 4096 x 2048", lambda: matmul(_meta(dtype, 64, 2048), w)


def _experts(dtype: torch.dtype) -> Iterator[Case]:
    """A mixture of experts at the widths of Qwen3-30B-A3B, and a router of few experts."""
    name, (E, k, D, inner) = _name(dtype), _EXPERTS
    for E_of_router, k_of_router in ((E, k), (8, 2)):
        what = f"router {name}, {k_of_router} of {E_of_router}"
        yield what, lambda E=E_of_router, k=k_of_router: _router(dtype, E, k)
    for phase, T in _TOKENS_OF_EXPERTS.items():
        rows, q, h = _rows(T), _meta(FP32, T, k), _meta(dtype, T * k, inner)
        x, dgu = _meta(dtype, T, D), _meta(dtype, T * k, 2 * inner)
        gate_up, down = _meta(dtype, E, 2 * inner, D), _meta(dtype, E, D, inner)
        products = {
            "gate and up": (x, gate_up, rows, True),
            "down": (h, down, rows, False, q),
            "input gradient": (dgu, gate_up.transpose(1, 2), rows, False),
            "gradient of down": (x, down.transpose(1, 2), rows, True, None, FP32),
        }
        for what, args in products.items():
            yield f"experts' {what} {name} {phase}", lambda args=args: grouped_matmul(*args)
    for what, args in _unrounded_experts(dtype).items() if dtype == BF16 else ():
        yield f"experts' {what} {name} unrounded", lambda args=args: grouped_matmul(*args)
    yield f"slots {name}", lambda: _slots(dtype)
    x, rows, q = _meta(dtype, 256, D), _rows(256), _meta(FP32, 256, k)
    yield f"slots {name}, weighted", lambda: rows_of_tokens(x, rows, q)
    for N, K in ((2 * inner, D), (D, inner)):
        for suffix, empty in (("", False), (", into an empty buffer", True)):
            yield (
                f"experts' weight gradient {name}, {N} x {K}{suffix}",
                lambda N=N, K=K, empty=empty: _expert_gradient(dtype, N, K, empty),
            )


def _unrounded_experts(dtype: torch.dtype) -> dict[str, tuple]:
    """The products with weights whose adapters are not merged, by grouped_matmul's arguments."""
    (E, k, D, inner), T = _EXPERTS, _TOKENS_OF_EXPERTS["prefill"]
    gate_up, wide = _meta(dtype, E, 2 * inner, D), _meta(dtype, T * k, 2 * inner)
    x, h, down = _meta(dtype, T * k, D), _meta(dtype, T * k, inner), _meta(dtype, E, D, inner)
    products = {
        "gate and up": (x, gate_up),
        "down": (h, down),
        "input gradient": (wide, gate_up.transpose(1, 2)),
    }
    return {what: (*args, _rows(T), False, None, FP32) for what, args in products.items()}


def _clamped_experts(dtype: torch.dtype) -> Iterator[Case]:
    """The experts of gpt-oss-120B, whose matrices are transposed and have biases."""
    name, (E, k, D) = _name(dtype), _CLAMPED_EXPERTS
    gate_up, down = (_meta(dtype, E, D, N).transpose(1, 2) for N in (2 * D, D))
    for phase, T in _TOKENS_OF_EXPERTS.items():
        rows, q = _rows(T, E, k), _meta(FP32, T, k)
        x, h, dgu = _meta(dtype, T, D), _meta(dtype, T * k, D), _meta(dtype, T * k, 2 * D)
        products = {
            "gate and up": (x, gate_up, rows, True, None, None, _meta(dtype, E, 2 * D)),
            "down": (h, down, rows, False, q, None, _meta(dtype, E, D)),
            "input gradient": (dgu, gate_up.transpose(1, 2), rows, False),
            "gradient of down": (x, down.transpose(1, 2), rows, True, None, FP32),
        }
        for what, args in products.items():
            yield f"clamped experts' {what} {name} {phase}", lambda args=args: grouped_matmul(*args)
    yield f"clamped_swiglu {name}", lambda: _clamped_swiglu(_meta(dtype, 256, 2 * D))
    yield f"clamped experts' biases {name}", lambda: _expert_biases(dtype)


def _clamped_swiglu(gu: torch.Tensor) -> None:
    clamped_swiglu_bwd(clamped_swiglu_fwd(gu, 1.702, 7.0), gu, 1.702, 7.0)


def _expert_biases(dtype: torch.dtype) -> None:
    """What they add to the gradient of the routing weights, and their own gradient."""
    (E, k, D), T = _CLAMPED_EXPERTS, 256
    rows = _rows(T, E, k)
    add_bias_dots(_meta(FP32, T, k), _meta(dtype, T, D), _meta(dtype, E, D), rows)
    add_expert_columns(GradBuffer(_meta(FP32, 1, E, D)), _meta(dtype, T * k, D), rows, _BLOCKS)


def _rows(T: int, E: int = _EXPERTS[0], k: int = _EXPERTS[1]) -> ExpertTables:
    return ExpertTables.empty(_meta(torch.int64, T, k), E)


def _slots(dtype: torch.dtype) -> None:
    """What is computed slot by slot."""
    (_, k, D, inner), T = _EXPERTS, 256
    rows, q, h = _rows(T), _meta(FP32, T, k), _meta(dtype, T * k, inner)
    sum_slots(_meta(dtype, T * k, D), rows)
    combine_bwd(_meta(FP32, T * k, inner), h, q, rows)
    rows_of_tokens(_meta(dtype, T, D), rows)


def _expert_gradient(dtype: torch.dtype, N: int, K: int, empty: bool) -> None:
    """One binary for all experts, sequences and rows: two experts stand for all of them."""
    dy, x = _meta(dtype, 256, N), _meta(dtype, 256, K)
    runs = Runs(*(_meta(torch.int32, *shape) for shape in ((2,), (3,), (2, 2))))
    add_expert_runs(_meta(FP32, 2, N, K), dy, x, runs, empty)


def _router(dtype: torch.dtype, E: int, k: int) -> None:
    renormalise = E == 128
    w, ids, p = topk_softmax_fwd(_meta(dtype, 256, E), k, renormalise)
    topk_softmax_bwd(w, w, ids, p, renormalise, dtype)


def _sigmoid_router(E: int, k: int, groups: int) -> None:
    """The logits are in fp32, and so is all else."""
    z, bias, w, ids = _meta(FP32, 256, E), _meta(FP32, E), _meta(FP32, 256, k), _meta(torch.int64, 256, k)
    choose(z, bias, k, groups, max(1, groups // 2))
    weigh(z, ids, True, 2.5, 1e-20)
    weigh_bwd(w, z, ids, True, 2.5, 1e-20)


def _given(E: int, k: int) -> None:
    """One binary for all dtypes; the router's own is in another case."""
    w, p = _meta(FP32, 256, k), _meta(FP32, 256, E)
    given_weights(p, _meta(torch.int64, 256, k), w, E == 128)


def _attention(dtype: torch.dtype) -> Iterator[Case]:
    for D, group in ATTENTION_SHAPES:
        yield from _attention_of(dtype, D, group, WALK)


def _attention_of(
    dtype: torch.dtype,
    D: int,
    group: int,
    rule: AttentionRule,
    wants_lse: tuple[bool, ...] = (True, False),
    sinks: bool = False,
) -> Iterator[Case]:
    """Forward with lse and without lse (scoring without a gradient), forward over pages, and backward."""
    q, k, spans, scale = _meta(dtype, 256, 8 * group, D), _meta(dtype, 256, 8, D), _spans(), D**-0.5
    name = f"{_name(dtype)} {D}, groups of {group}{_mask_name(rule)}" + ", sinks" * sinks
    lse = _meta(FP32, 256, 8 * group)
    z = lse if sinks else None
    for want_lse in wants_lse:
        suffix = "" if want_lse else ", without lse"
        yield (
            f"attention {name}{suffix}",
            lambda lse=want_lse: attention_packed(q, k, k, spans, scale, lse, rule, z),
        )
    yield f"attention {name}, paged", lambda: _paged(dtype, dtype, D, group, rule=rule, sinks=sinks)
    if dtype != FP32:
        prompts = f"attention {name}, prompts in pages"
        yield prompts, lambda: _paged(dtype, dtype, D, group, tokens=256, rule=rule, sinks=sinks)
    yield (
        f"attention backward {name}",
        lambda: attention_bwd(q, q, k, k, q, lse, spans, scale, rule),
    )


def _mask_name(rule: AttentionRule) -> str:
    window = f", window {rule.window}" if rule.window else ""
    return window + (f", cap {rule.cap:g}" if rule.cap else "")


def _chunked_attention(dtype: torch.dtype, D: int, group: int, sinks: bool = False) -> Iterator[Case]:
    """Sums in chunks of keys: packed, over pages, and a decoding turn; and each without a second chunk."""
    rule = RULES["chunked-512"]
    name = f"attention in chunks {_name(dtype)} {D}, groups of {group}" + ", sinks" * sinks
    z = _meta(FP32, 256, 8 * group) if sinks else None
    z2 = z[:2] if sinks else None
    q, k, scale = _meta(dtype, 256, 8 * group, D), _meta(dtype, 256, 8, D), D**-0.5
    cache = _meta(dtype, 32, KEY_TILE, 8, D)
    for suffix, keys in (("", 2 * rule.chunk), (", one chunk", rule.chunk)):
        spans = _spans(pages=keys // KEY_TILE)
        yield name + suffix, lambda keys=keys: walk_packed(q, k, k, _spans(), scale, rule, True, keys, z)
        yield f"{name}, paged{suffix}", lambda s=spans: walk_paged(q, cache, cache, s, scale, rule, z)
        yield f"{name}, decode{suffix}", lambda s=spans: split_paged(q[:2], cache, cache, s, scale, rule, z2)

    def shared() -> None:
        spans = _spans(pages=32)._replace(shared=no_chunks(2, 8 * group, 8, dtype, q.device))
        split_paged(q[:2], cache, cache, spans, scale, rule, z2)

    yield f"{name}, shared chunks", shared


def _spans(pages: int = 0) -> Spans:
    """Two sequences of meta tensors, packed, or each in `pages` pages."""
    cu_seqlens, seqused = _meta(torch.int32, 3), _meta(torch.int32, 2)
    if pages:
        return Spans(cu_seqlens, seqused, _meta(torch.int32, 2, pages), 8)
    tables = _meta(torch.int32, 8, 4), _meta(torch.int32, 8, 6)
    return Spans(cu_seqlens, seqused, None, 8, cu_seqlens, *tables)


def _paged(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    D: int,
    group: int,
    tokens: int = 2,
    rule: AttentionRule = WALK,
    sinks: bool = False,
) -> None:
    """Two sequences over pages. Those of many tokens have programs of more rows on Hopper."""
    cache = _meta(cache_dtype, 32, KEY_TILE, 8, D)
    q = _meta(dtype, tokens, 8 * group, D)
    z = _meta(FP32, tokens, 8 * group) if sinks else None
    attention_paged(q, cache, cache, _spans(pages=16), D**-0.5, rule, z)


def _logprob() -> Iterator[Case]:
    """Forward, and backward: over logits of the gradient's dtype, or from truncated logits in fp32."""
    ids, row = _meta(torch.int64, 64), _meta(FP32, 64)

    def backward(logits: torch.dtype, dlogits: torch.dtype, temperature: float) -> Callable[[], None]:
        x, dx = _meta(logits, 64, 4096), _meta(dlogits, 64, 4096)
        return lambda: logprob_bwd(x, ids, row, row, row, dx, temperature, temperature)

    for temperature, dtype in product((1.0, 0.7), DTYPES):
        suffix = "" if temperature == 1.0 else f" at temperature {temperature}"
        yield (
            f"logprob of {_name(dtype)} logits{suffix}",
            lambda t=temperature, dtype=dtype: logprob_fwd(_meta(dtype, 64, 4096), ids, t),
        )
    for temperature, dtype in ((1.0, BF16), (0.7, BF16), (0.7, FP32)):
        suffix = "" if temperature == 1.0 else f" at temperature {temperature}"
        yield (
            f"logprob of {_name(dtype)} logits by leaves{suffix}",
            lambda t=temperature, dtype=dtype: logprob_fwd(_meta(dtype, 64, 4096), ids, t, Leaves(8)),
        )
    # Vocabularies of up to 2^18: 49, 128 and 152 thousand, and a small one.
    for V, temperature, dtype in product((4096, 49152, 128256, 151936), (1.0, 0.7), DTYPES):
        yield (
            f"draw of {_name(dtype)} from {V} at temperature {temperature}",
            lambda V=V, temperature=temperature, dtype=dtype: draw_tokens(
                _meta(dtype, 64, V), _meta(torch.float64, 64), temperature
            ),
        )
    for temperature in (1.0, 0.7):
        suffix = "" if temperature == 1.0 else f" at temperature {temperature}"
        for dtype in DTYPES:
            yield f"logprob gradient of {_name(dtype)}{suffix}", backward(dtype, dtype, temperature)
        for dtype in (BF16, FP16):
            yield f"truncated logprob of {_name(dtype)}{suffix}", backward(FP32, dtype, temperature)
