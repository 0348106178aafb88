"""Other projects' kernels beside ours, for device.sh.

vLLM's kernels: bits and rates. Liger-Kernel's: rates. Our attention's backward: beside one with atomics.

A section whose packages are missing says so in its one row. Liger's fused linear cross entropy is left out:
it returns the mean loss of a batch, and takes its gradient on the way forward. Ours returns each token's
logprob and entropy, which can be weighted afterwards.
"""

from collections.abc import Callable, Iterator

import torch
from zerokl.benchmarks.machine import Machine, Row, name_of, row
from zerokl.benchmarks.vllm_files import VllmKernels, vllm_kernels
from zerokl.files.bitwise import count_unequal
from zerokl.kernels import matmul
from zerokl.kernels.attention import varlen_plan
from zerokl.kernels.attention_tables import Spans
from zerokl.kernels.backend import on_triton
from zerokl.kernels.linear import linear
from zerokl.kernels.logprob import token_logprobs
from zerokl.kernels.rms_norm import rms_norm
from zerokl.kernels.rope import rope
from zerokl.kernels.silu_mul import silu_mul
from zerokl.kernels.tile_tables import tile_table

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_Outputs = torch.Tensor | tuple[torch.Tensor, ...]
# Errors of a package that is missing or there in part. They are reported as a reason, not as a result.
_NOT_THERE = (ImportError, AttributeError, RuntimeError, OSError)


def _not_compared(what: str, kernels: VllmKernels | None) -> Row:
    reason = "they need a GPU" if kernels else "no folder vllm/ is on the path"
    return {"what": f"{what}: not compared ({reason})"}


def vllm_equality(m: Machine) -> Iterator[Row]:
    """Our matrix product, norm, log-softmax and attention beside vLLM's, where its files are on the path."""
    kernels = vllm_kernels(m.device)
    if kernels is None or not on_triton(m.randn(1, dtype=torch.float32)):
        yield _not_compared("vLLM's kernels", kernels)
        return
    for name, (D, inner, *_) in m.shapes.items():
        for dtype in _DTYPES:
            yield from _vllm_products_and_norms(m, kernels, name, D, inner, dtype)
    z, ids = m.randn(64, m.vocab, dtype=torch.float32), torch.arange(64, device=m.device)
    logp = kernels.batch_invariant.log_softmax(z).gather(1, ids.unsqueeze(1)).squeeze(1)
    yield {
        "what": f"vLLM {kernels.version}'s log_softmax",
        "unequal": count_unequal(token_logprobs(z, ids)[0], logp),
    }
    yield from _vllm_attention(m, kernels.unified_attention.unified_attention, kernels.version)


def _vllm_products_and_norms(
    m: Machine, kernels: VllmKernels, name: str, D: int, inner: int, dtype: torch.dtype
) -> Iterator[Row]:
    """Products with and without a bias, and norms, of 1 to 1000 rows (small: to 64)."""
    vllm, tiles = kernels.batch_invariant, tile_table(kernels.version)
    w, b = m.randn(2 * inner, D, dtype=dtype, scale=D**-0.5), m.randn(2 * inner, dtype=dtype)
    norm = m.randn(D, dtype=dtype)
    unequal = unequal_norm = 0
    for M in (1, 16, 64, 65, 1000)[: 3 if m.small else None]:
        x = m.randn(M, D, dtype=dtype)
        for bias in (None, b):
            ours = linear(x, w, bias, tiles=tiles)
            unequal += count_unequal(ours, vllm.matmul_persistent(x, w.t(), bias))
        unequal_norm += count_unequal(rms_norm(x, norm, 1e-6), vllm.rms_norm_batch_invariant(x, norm, 1e-6))
    yield {
        "what": f"vLLM {kernels.version}'s matmul_persistent {name_of(dtype)} {name}",
        "unequal": unequal,
    }
    yield {
        "what": f"vLLM {kernels.version}'s rms_norm_batch_invariant {name_of(dtype)} {name}",
        "unequal": unequal_norm,
    }


def _vllm_attention(m: Machine, unified_attention: Callable[..., None], version: str) -> Iterator[Row]:
    """A prefill, a chunk and a decoding token in one call, against pages of 16."""
    from zerokl.kernels.attention_triton import attention_paged

    lengths, queries, pages = [70, 300, 513], [70, 40, 1], 40
    cu_seqlens_q = torch.tensor([0, 70, 110, 111], dtype=torch.int32, device=m.device)
    seqused_k = torch.tensor(lengths, dtype=torch.int32, device=m.device)
    block_table = torch.randperm(3 * pages, device=m.device).int().view(3, pages)
    for name, (_, _, _, heads, kv_heads, D) in m.shapes.items():
        for dtype in _DTYPES:
            q = m.randn(sum(queries), heads, D, dtype=dtype)
            k, v = (m.randn(3 * pages, 16, kv_heads, D, dtype=dtype) for _ in range(2))
            vllm_o = torch.empty_like(q)
            unified_attention(
                q,
                k,
                v,
                vllm_o,
                cu_seqlens_q,
                max(queries),
                seqused_k,
                max(lengths),
                D**-0.5,
                True,  # causal
                (-1, -1),  # window
                block_table,
                0,  # soft cap
                None,  # descale factors of q, k and v
                None,
                None,
            )
            our_o = attention_paged(q, k, v, Spans(cu_seqlens_q, seqused_k, block_table, kv_heads), D**-0.5)
            yield {
                "what": f"vLLM {version}'s unified_attention {name_of(dtype)} {name}",
                "unequal": count_unequal(our_o, vllm_o),
            }


def vllm_rates(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """vLLM's batch-invariant kernels (plain_ms) beside ours: the time that each takes for the same bits."""
    kernels = vllm_kernels(m.device)
    if kernels is None or not m.on_gpu:
        yield _not_compared("rates of vLLM's kernels", kernels)
        return
    vllm = kernels.batch_invariant
    for name, (D, inner, *_) in m.shapes.items():
        x = m.randn(m.tokens, D, dtype=dtype)
        w = m.randn(2 * inner, D, dtype=dtype, scale=D**-0.5)
        norm = m.randn(D, dtype=dtype)
        for rows in (16, m.tokens):
            few = x[:rows].clone()
            yield row(
                m,
                f"{name} linear, {rows} rows, beside vLLM's",
                2.0 * w.numel() * rows,
                "TFLOP/s",
                lambda a=few, w=w: matmul.matmul(a, w),
                lambda a=few, w=w: vllm.matmul_persistent(a, w.t()),
            )
        with torch.no_grad():
            norms = row(
                m,
                f"{name} rms_norm, beside vLLM's",
                2.0 * x.nbytes,
                "GB/s",
                lambda x=x, n=norm: rms_norm(x, n, 1e-6),
                lambda x=x, n=norm: vllm.rms_norm_batch_invariant(x, n, 1e-6),
            )
        yield norms
    z, ids = m.randn(256, m.vocab, dtype=torch.float32), torch.zeros(256, dtype=torch.int64, device=m.device)
    yield row(
        m,
        f"logprobs of 256 rows of {m.vocab}, beside vLLM's",
        2.0 * z.nbytes,
        "GB/s",
        lambda: token_logprobs(z, ids),
        lambda: vllm.log_softmax(z).gather(1, ids.unsqueeze(1)),
    )


def liger_rates(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """Liger-Kernel (plain_ms) beside ours, forward and backward together.

    Its weight gradient of a norm is summed in no fixed order.
    """
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except _NOT_THERE as error:
        reason = (str(error).splitlines() or [""])[0][:60]
        yield {"what": f"Liger-Kernel: not compared ({type(error).__name__}: {reason})"}
        return
    for name, (D, inner, _, heads, kv_heads, head_dim) in m.shapes.items():
        T = m.tokens
        x, gu, w = (m.randn(*shape, dtype=dtype).requires_grad_() for shape in ((T, D), (T, 2 * inner), (D,)))
        yield _both_ways(
            m,
            f"{name} rms_norm",
            5.0 * x.nbytes,
            lambda x=x, w=w: rms_norm(x, w, 1e-6),
            lambda x=x, w=w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False),
            (x, w),
        )
        gate, up = (t.detach().contiguous().requires_grad_() for t in gu.detach().chunk(2, dim=1))
        yield _both_ways(
            m,
            f"{name} silu_mul",
            4.0 * gu.nbytes,
            lambda gu=gu: silu_mul(gu),
            lambda a=gate, b=up: LigerSiLUMulFunction.apply(a, b),
            (gu,),
            (gate, up),
        )
        yield _liger_rope(m, name, heads, kv_heads, head_dim, dtype, LigerRopeFunction.apply)


def _liger_rope(
    m: Machine, name: str, heads: int, kv_heads: int, D: int, dtype: torch.dtype, liger_rope: Callable
) -> Row:
    qk = m.randn(m.tokens, heads + kv_heads, D, dtype=dtype).requires_grad_()
    # Liger rotates q and k in place.
    q, k = (
        t.detach().transpose(0, 1).unsqueeze(0).requires_grad_() for t in qk.split([heads, kv_heads], dim=1)
    )
    angle = m.randn(m.tokens, D // 2, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    wide = [torch.cat([t, t], 1).unsqueeze(0).to(dtype) for t in (cos, sin)]
    return _both_ways(
        m,
        f"{name} rope",
        4.0 * qk.nbytes,
        lambda: rope(qk, cos, sin),
        lambda: liger_rope(q, k, *wide),
        (qk,),
        (q, k),
    )


def _both_ways(
    m: Machine,
    what: str,
    nbytes: float,
    ours: Callable[[], _Outputs],
    liger: Callable[[], _Outputs],
    leaves: tuple[torch.Tensor, ...],
    liger_leaves: tuple[torch.Tensor, ...] | None = None,
) -> Row:
    """Forward and backward of our function and of Liger's, each with its leaves (by default, the same)."""

    def run(f: Callable[[], _Outputs], leaves: tuple[torch.Tensor, ...]) -> Callable[[], object]:
        dy = [torch.ones_like(y) for y in _tuple(f())]
        return lambda: torch.autograd.grad(_tuple(f()), leaves, dy)

    return row(
        m,
        f"{what} forward and backward, beside Liger's",
        nbytes,
        "GB/s",
        run(ours, leaves),
        run(liger, liger_leaves or leaves),
    )


def _tuple(y: _Outputs) -> tuple[torch.Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def atomic_rates(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """Our attention's backward beside one with an atomic dq (atomic_attention.py).

    ours_over_atomic is the price of a fixed order of sums.
    """
    if not m.on_gpu:
        yield {"what": "attention backward beside one with atomics: not compared (it needs a GPU)"}
        return
    from zerokl.benchmarks.atomic_attention import attention_bwd_atomic
    from zerokl.kernels.attention_bwd_triton import attention_bwd
    from zerokl.kernels.attention_triton import attention_packed

    for name, (*_, heads, kv_heads, D) in m.shapes.items():
        for length in (m.length, m.tokens):
            spans = varlen_plan([length] * (m.tokens // length), heads, kv_heads).on(m.device)
            q, k, v, do = (m.randn(m.tokens, h, D, dtype=dtype) for h in (heads, kv_heads, kv_heads, heads))
            o, lse = attention_packed(q, k, v, spans, D**-0.5, want_lse=True)
            inputs = (do, q, k, v, o, lse, spans, D**-0.5)
            flops = 5.0 * m.tokens * length * heads * D
            backwards = row(
                m,
                f"{name} attention backward, sequences of {length}, beside atomics",
                flops,
                "TFLOP/s",
                lambda a=inputs: attention_bwd(*a),
                lambda a=inputs: attention_bwd_atomic(*a),
            )
            yield backwards | {"ours_over_atomic": 1.0 / backwards["plain_over_ours"]}
