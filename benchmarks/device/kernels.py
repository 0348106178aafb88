"""Kernels: each beside plain torch, beside one with atomics, and beside Liger-Kernel's. Inputs are random.

Plain torch is cuBLAS and scaled_dot_product_attention. Beside an elementwise kernel it is a copy of as many
bytes.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from zerokl.benchmarks.device.experts import expert_rates
from zerokl.benchmarks.machine import Machine, Row, row
from zerokl.benchmarks.peers import atomic_rates, liger_rates
from zerokl.kernels import matmul, order
from zerokl.kernels.attention import attention, attention_cached, varlen_plan
from zerokl.kernels.attention_plan import KEY_TILE, AttentionPlan
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.qk_norm import qk_norm
from zerokl.kernels.rms_norm import add_rms_norm, rms_norm
from zerokl.kernels.rope import rope
from zerokl.kernels.silu_mul import silu_mul


def kernel_rates(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """Each kernel beside plain torch, at the shapes of three models."""
    for name, (D, inner, _, heads, kv_heads, head_dim) in m.shapes.items():
        yield from _linear_rates(m, name, D, 2 * inner, dtype)
        yield from _attention_rates(m, name, heads, kv_heads, head_dim, dtype)
        yield from _decode_rates(m, name, heads, kv_heads, head_dim, dtype)
        yield from _row_rates(m, name, D, inner, heads, kv_heads, head_dim, dtype)
        yield from _logprob_rates(m, name, D, dtype)
    yield from expert_rates(m, dtype)


def _linear_rates(m: Machine, name: str, K: int, N: int, dtype: torch.dtype) -> Iterator[Row]:
    T, w = m.tokens, m.randn(N, K, dtype=dtype, scale=K**-0.5)
    x, dy = m.randn(T, K, dtype=dtype), m.randn(T, N, dtype=dtype)
    buffer, blocks = GradBuffer(torch.zeros(1, *w.shape, device=m.device)), order.token_blocks([T])

    def add(empty: bool) -> None:
        buffer.empty.update([0] if empty else [])
        matmul.add_outer(buffer, dy, x, blocks)

    few, flops = x[:16].clone(), 2.0 * w.numel()
    calls = {
        "linear, 16 rows": (16, lambda: matmul.matmul(few, w), lambda: F.linear(few, w)),
        f"linear, {T} rows": (T, lambda: matmul.matmul(x, w), lambda: F.linear(x, w)),
        "input gradient": (T, lambda: matmul.matmul(dy, w.t()), lambda: dy @ w),
        "weight gradient": (T, partial(add, False), lambda: dy.t() @ x),
        "weight gradient into an empty buffer": (T, partial(add, True), lambda: dy.t() @ x),
    }
    for what, (rows, ours, plain) in calls.items():
        yield row(m, f"{name} {what}", flops * rows, "TFLOP/s", ours, plain)


def _row_rates(
    m: Machine, name: str, D: int, inner: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Iterator[Row]:
    T, H = m.tokens, heads + kv_heads
    x, gu, w = (m.randn(*n, dtype=dtype).requires_grad_() for n in ((T, D), (T, 2 * inner), (D,)))
    qk, wq, wk = (
        m.randn(*n, dtype=dtype).requires_grad_() for n in ((T, H, head_dim), (head_dim,), (head_dim,))
    )
    angle, residual = m.randn(T, head_dim // 2, dtype=torch.float32), m.randn(T, D, dtype=dtype)
    cos, sin = angle.cos(), angle.sin()
    forward = {
        "rms_norm": (2.0 * x.nbytes, lambda: rms_norm(x, w, 1e-6)),
        "add_rms_norm": (4.0 * x.nbytes, lambda: add_rms_norm(x, residual, w, 1e-6)),
        "qk_norm": (2.0 * qk.nbytes, lambda: qk_norm(qk, wq, wk, heads, 1e-6)),
        "silu_mul": (1.5 * gu.nbytes, lambda: silu_mul(gu)),
        "rope": (2.0 * qk.nbytes, lambda: rope(qk, cos, sin)),
    }
    with torch.no_grad():
        for what, (nbytes, run) in forward.items():
            yield _beside_copy(m, f"{name} {what}", nbytes, run)
    for what, (nbytes, leaves) in {
        "rms_norm": (3.0 * x.nbytes, (x, w)),
        "qk_norm": (3.0 * qk.nbytes, (qk, wq, wk)),
        "silu_mul": (2.5 * gu.nbytes, (gu,)),
    }.items():
        y = forward[what][1]()
        dy = m.randn(*y.shape, dtype=dtype)
        backward = partial(torch.autograd.grad, y, leaves, dy, retain_graph=True)
        yield _beside_copy(m, f"{name} {what} backward", nbytes, backward)


def _beside_copy(m: Machine, what: str, nbytes: float, run: Callable[[], object]) -> Row:
    """A kernel that reads and writes `nbytes`, beside a copy that reads and writes as many."""
    source = torch.zeros(int(nbytes) // 2, dtype=torch.uint8, device=m.device)
    target = torch.empty_like(source)
    return row(m, what, nbytes, "GB/s", run, lambda: target.copy_(source))


def _logprob_rates(m: Machine, name: str, D: int, dtype: torch.dtype) -> Iterator[Row]:
    """The lm_head with the log-softmax, forward and backward.

    It takes four products with the weight, as the backward computes the logits again.
    """
    T = m.tokens // 4
    h = m.randn(T, D, dtype=dtype).requires_grad_()
    w = m.randn(m.vocab, D, dtype=dtype, scale=D**-0.5).requires_grad_()
    ids = torch.arange(T, device=m.device) % m.vocab

    def ours() -> object:
        return torch.autograd.grad(linear_logprob(h, w, ids)[0].sum(), (h, w))

    def plain() -> object:
        loss = F.cross_entropy(F.linear(h, w).float(), ids, reduction="sum")
        return torch.autograd.grad(loss, (h, w))

    what = f"{name} logprobs of {T} rows of {m.vocab}, both ways"
    yield row(m, what, 8.0 * T * w.numel(), "TFLOP/s", ours, plain)


def _decode_rates(
    m: Machine, name: str, heads: int, kv_heads: int, D: int, dtype: torch.dtype
) -> Iterator[Row]:
    """One token of each of S sequences against their cache; the bytes are those of keys and values."""
    S, L = (4, 64) if m.small else (64, 1024)
    blocks = S * L // KEY_TILE
    q = m.randn(S, heads, D, dtype=dtype)
    tiles = m.randn(blocks * kv_heads, 2, KEY_TILE, D, dtype=dtype)
    plan = AttentionPlan([1] * S, [L - 1] * S, np.arange(blocks).reshape(S, -1), heads, kv_heads)
    k, v = (m.randn(S, kv_heads, L, D, dtype=dtype) for _ in range(2))

    def ours() -> torch.Tensor:
        return attention_cached(q, tiles, plan, D**-0.5)

    def plain() -> torch.Tensor:
        return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)

    what = f"{name} attention of {S} decoding sequences of {L}"
    with torch.no_grad():
        yield row(m, what, float(tiles.nbytes), "GB/s", ours, plain)


def _attention_rates(
    m: Machine, name: str, heads: int, kv_heads: int, D: int, dtype: torch.dtype
) -> Iterator[Row]:
    T, L = m.tokens, m.length
    plan = varlen_plan([L] * (T // L), heads, kv_heads)
    q, k, v = (m.randn(T, h, D, dtype=dtype).requires_grad_() for h in (heads, kv_heads, kv_heads))
    do, flops = m.randn(T, heads, D, dtype=dtype), 2.0 * T * L * heads * D  # half of the scores are hidden

    def plain() -> torch.Tensor:
        batched = (x.view(T // L, L, -1, D).transpose(1, 2) for x in (q, k, v))
        return (
            F.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .reshape(T, heads, D)
        )

    def ours() -> torch.Tensor:
        return attention(q, k, v, plan, D**-0.5)

    with torch.no_grad():
        yield row(m, f"{name} attention", flops, "TFLOP/s", ours, plain)
    outputs = ours(), plain()
    backwards = [lambda o=o: torch.autograd.grad(o, (q, k, v), do, retain_graph=True) for o in outputs]
    yield row(m, f"{name} attention backward", 2.5 * flops, "TFLOP/s", *backwards)


SECTIONS = (kernel_rates, atomic_rates, liger_rates)
