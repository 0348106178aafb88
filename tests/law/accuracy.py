"""The operations of the kernels beside plain torch's, judged against fp64."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.func import functional_call
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from zerokl.kernels.add_shared import add_shared
from zerokl.kernels.attention import attention, varlen_plan
from zerokl.kernels.embedding import embedding
from zerokl.kernels.gelu_mul import gelu_mul
from zerokl.kernels.linear import linear
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.qk_norm import qk_norm
from zerokl.kernels.rms_norm import add_rms_norm, rms_norm
from zerokl.kernels.rope import rope, rope_frequencies, rope_table
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.scale import scale
from zerokl.kernels.share_key import share_key
from zerokl.kernels.silu_mul import silu_mul
from zerokl.kernels.softcap import softcap
from zerokl.kernels.value_head import value_head

from tests.helpers import assert_at_most_twice_the_error, randint, randn
from tests.law import experts, routers

EPS = 1e-6
LENGTHS = (40, 1, 97)
IDS = randint(5, 300, 150)
# The errors of all these runs are judged together. The largest error of a single run is noisy: attention's is
# up to 3 times plain torch's.
SEEDS = range(0, 200, 20)
COS, SIN = rope_table(rope_frequencies(32, 1e4), 150, torch.float64)

Function = Callable[..., torch.Tensor]


class Op(NamedTuple):
    """The shapes of an operation's differentiable inputs, our function and plain torch's function.

    Both functions take the inputs in one dtype.
    """

    shapes: tuple[tuple[int, ...], ...]
    ours: Function
    plain: Function


def _plain_gelu_mul(gu):
    g, u = gu.chunk(2, dim=1)
    return F.gelu(g, approximate="tanh") * u


def _plain_rope(x: torch.Tensor) -> torch.Tensor:
    cos, sin = (torch.cat([t, t], -1)[: len(x)].to(x.dtype).unsqueeze(1) for t in (COS, SIN))
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat([-x2, x1], -1) * sin


def _plain_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    s = x + residual
    return torch.cat([F.rms_norm(s, w.shape, w, EPS), s])


def _value_head(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The values, and h after them: both have a gradient."""
    v, h = value_head(h, w)
    return torch.cat([v.unsqueeze(1), h], 1)


def _plain_value_head(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.linear(h, w.unsqueeze(0)), h], 1)


def _plain_qk_norm(x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.rms_norm(part, w.shape, w, EPS) for part, w in ((x[:, :2], wq), (x[:, 2:], wk))], 1)


def _plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group, outs = q.shape[1] // k.shape[1], []
    for parts in zip(*(x.split(LENGTHS) if len(x) == sum(LENGTHS) else (x,) for x in (q, k, v)), strict=True):
        q_h, k_h, v_h = (x.transpose(0, 1) for x in parts)
        k_h, v_h = (x.repeat_interleave(group, 0) for x in (k_h, v_h))
        outs.append(F.scaled_dot_product_attention(q_h, k_h, v_h, is_causal=True).transpose(0, 1))
    return torch.cat(outs)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    lengths = LENGTHS if len(q) == sum(LENGTHS) else (len(q),)
    return attention(q, k, v, varlen_plan(lengths, q.shape[1], k.shape[1]), q.shape[-1] ** -0.5)


def _plain_experts(
    x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, renormalise: bool
) -> torch.Tensor:
    """transformers' experts, behind its router with our rule for ties: the lower index."""
    E, D = logits.shape[1], x.shape[1]
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    q, ids = (both[:, : experts.CHOSEN] for both in p.sort(dim=1, descending=True, stable=True))
    q = q / q.sum(-1, keepdim=True) if renormalise else q
    config = Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=down.shape[1], num_experts=E)
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    matrices = {"gate_up_proj": gate_up.view(E, -1, D), "down_proj": down.view(E, D, -1)}
    return functional_call(module, matrices, (x, ids, q.to(x.dtype)))


BIASED = SamplingParams.of(0.7, logit_bias={1: 2.5, 8: -3.25})


def _capped_logprob(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return linear_logprob(h, w, IDS[: len(h)].remainder(len(w)), cap=5.0)[0]


def _plain_capped_logprob(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As transformers' Gemma 2: the capped logits are in the dtype of the product."""
    logits = torch.tanh(F.linear(h, w) / 5.0) * 5.0
    logits = logits.to(torch.promote_types(h.dtype, torch.float32))
    return torch.log_softmax(logits, -1).gather(1, IDS[: len(h)].remainder(len(w)).unsqueeze(1)).squeeze(1)


def _plain_logprob(sampling_params: SamplingParams) -> Function:
    def run(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        z = F.linear(h, w)
        z = z if z.dtype == torch.float64 else z.float()
        for token, bias in sampling_params.logit_bias:
            z = z.index_add(1, torch.tensor([token]), z.new_full((len(z), 1), bias))
        z = z / (sampling_params.temperature or 1.0)
        if 0 < sampling_params.top_k < z.shape[1]:
            z = z.masked_fill(z < z.topk(sampling_params.top_k).values[:, -1:], float("-inf"))
        return torch.log_softmax(z, -1).gather(1, IDS[: len(h)].remainder(len(w)).unsqueeze(1)).squeeze(1)

    return run


def _logprob(sampling_params: SamplingParams) -> Function:
    return lambda h, w: linear_logprob(h, w, IDS[: len(h)].remainder(len(w)), sampling_params)[0]


OPS = {
    "linear": Op(((150, 200), (70, 200)), linear, F.linear),
    "linear with bias": Op(((150, 200), (70, 200), (70,)), linear, F.linear),
    "rms_norm": Op(
        ((150, 1000), (1000,)),
        lambda x, w: rms_norm(x, w, EPS),
        lambda x, w: F.rms_norm(x, w.shape, w, EPS),
    ),
    "add_rms_norm": Op(
        ((150, 200), (150, 200), (200,)),
        lambda x, residual, w: torch.cat(add_rms_norm(x, residual, w, EPS)),
        _plain_add_rms_norm,
    ),
    "qk_norm": Op(((50, 3, 64), (64,), (64,)), lambda x, wq, wk: qk_norm(x, wq, wk, 2, EPS), _plain_qk_norm),
    "qk_norm plus one": Op(
        ((50, 3, 64), (64,), (64,)),
        lambda x, wq, wk: qk_norm(x, wq, wk, 2, EPS, plus_one=True),
        lambda x, wq, wk: _plain_qk_norm(x, 1.0 + wq, 1.0 + wk),
    ),
    "softcap": Op(((150, 200),), lambda x: softcap(x, 1.5), lambda x: torch.tanh(x / 1.5) * 1.5),
    "value_head": Op(((150, 1000), (1000,)), _value_head, _plain_value_head),
    "silu_mul": Op(((150, 200),), silu_mul, lambda gu: F.silu(gu.chunk(2, 1)[0]) * gu.chunk(2, 1)[1]),
    "add_shared": Op(
        ((150, 200), (150, 200), (150, 1)), add_shared, lambda e, s, z: e + torch.sigmoid(z) * s
    ),
    "sigmoid_router": Op(((150, routers.EXPERTS),), lambda z: routers.chosen(z)[0], routers.plain),
    "gelu_mul": Op(((150, 200),), gelu_mul, _plain_gelu_mul),
    "rms_norm plus one": Op(
        ((150, 1000), (1000,)),
        lambda x, w: rms_norm(x, w, EPS, plus_one=True),
        lambda x, w: F.rms_norm(x, (x.shape[1],), 1.0 + w, EPS),
    ),
    "scale": Op(((150, 200),), lambda x: scale(x, 0.22), lambda x: x * 0.22),
    "share_key": Op(((150, 64),), lambda x: share_key(x, 5), lambda x: x.unsqueeze(1).expand(-1, 5, -1)),
    "rope": Op(
        ((150, 3, 32),), lambda x: rope(x, COS[: len(x)].to(x.dtype), SIN[: len(x)].to(x.dtype)), _plain_rope
    ),
    "embedding": Op(
        ((300, 40),),
        lambda w: embedding(IDS.remainder(len(w)), w),
        lambda w: F.embedding(IDS.remainder(len(w)), w),
    ),
    "attention": Op(((138, 4, 32), (138, 2, 32), (138, 2, 32)), _attention, _plain_attention),
    "experts": Op(
        ((150, 64), (150, 6), (6 * 2 * 48, 64), (6 * 64, 48)),
        lambda *inputs: experts.experts_of_logits(*inputs)[0],
        partial(_plain_experts, renormalise=True),
    ),
    "experts without renormalisation": Op(
        ((150, 64), (150, 6), (6 * 2 * 48, 64), (6 * 64, 48)),
        lambda *inputs: experts.experts_of_logits(*inputs, renormalise=False)[0],
        partial(_plain_experts, renormalise=False),
    ),
    "linear_logprob": Op(
        ((150, 64), (300, 64)), _logprob(SamplingParams()), _plain_logprob(SamplingParams())
    ),
    "linear_logprob at a temperature": Op(
        ((150, 64), (300, 64)), _logprob(SamplingParams(0.7)), _plain_logprob(SamplingParams(0.7))
    ),
    "linear_logprob with a cap": Op(((150, 64), (300, 64)), _capped_logprob, _plain_capped_logprob),
    "linear_logprob with a bias": Op(((150, 64), (300, 64)), _logprob(BIASED), _plain_logprob(BIASED)),
}


def inputs(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    return [
        randn(seed + i, *shape, dtype=dtype, scale=1.0 if i == 0 else 0.5).requires_grad_()
        for i, shape in enumerate(shapes)
    ]


def outputs(function: Function, leaves: list[torch.Tensor], dy: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradient of every input."""
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def assert_accurate(op: Op, dtype: torch.dtype, seeds: Iterable[int] = SEEDS) -> None:
    """Check that output and gradients are at most twice as far from fp64 as plain torch in the same dtype."""
    ours, plain, exact = [], [], []
    for seed in seeds:
        leaves = inputs(op.shapes, dtype, seed)
        dy = randn(seed + 9, *op.ours(*leaves).shape, dtype=dtype)
        ours.append(outputs(op.ours, leaves, dy))
        plain.append(outputs(op.plain, leaves, dy))
        exact.append(outputs(op.plain, [x.detach().double().requires_grad_() for x in leaves], dy))
    names = ["output", *(f"gradient of input {i}" for i in range(len(op.shapes)))]
    for i, name in enumerate(names):
        stacked = (torch.stack([tensors[i] for tensors in runs]) for runs in (ours, plain, exact))
        assert_at_most_twice_the_error(*stacked, name)
