"""What an operation at fault computes instead: changed operations are tried, and the one that fits is named.

A change fits where the operation, computed with it in fp64 from the same inputs, differs from the engine's
output by no more than rounding. So "rope_theta is 20000" is a finding, and not a guess.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from ...kernels.rope import rope_frequencies
from ...kernels.sampling_params import SamplingParams
from ...model.operation import Equation
from ...model.operations import (
    fused_with,
    input_names,
    known_operation,
    operation,
    operation_names,
    split_name,
)
from .operation_errors import FIT, excess, in_dtype, recorded, rms
from .operations import Lookup, Operations, Tensor, linear, weight_names

Change = tuple[str, Tensor]  # what would be changed, in words, and the output that it would give
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SHORT = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# In TF32 a factor of an fp32 product has float16's 11 bits; vLLM's attention on a GPU is an example.
_PRODUCTS = {Equation.LINEAR, Equation.ATTENTION, Equation.EXPERTS}
_TF32 = ", or with products in TF32, which is Triton's default on a GPU (TRITON_F32_DEFAULT=ieee is fp32)"
# Other layers whose weights are tried. A model of 80 layers would take minutes.
_NEIGHBOURS = 4


def explain(op: str, trace: dict[str, Tensor], exact: Operations) -> str:
    """What an engine computes instead of the checkpoint's operation, in words; empty where nothing fits."""
    lookup = recorded(trace, exact)
    actual = trace[op].to(exact.checkpoint.device).double()
    if not actual.isfinite().all():
        return f"{int((~actual.isfinite()).sum())} of its {actual.numel()} outputs are infinite or NaN"
    if not actual.any():
        return "all its outputs are 0: its weight was not loaded, or was set to 0"
    dtype = trace[op].dtype
    expected = exact.compute(op, lookup)
    sound = in_dtype(exact, dtype).compute(op, lookup).double() - expected
    fits = [
        (excess(actual, output, sound, dtype), words)
        for words, output in _changes(op, actual, exact, lookup, trace)
        if output.shape == actual.shape
    ]
    best = min(error for error, _ in fits)
    if best <= FIT:
        # The likeliest of those that fit about as well: a fitted weight always fits a little better.
        return next(words for error, words in fits if error <= max(1.5, 2 * best))
    return _of_lower_precision(op, actual, exact, lookup)


def _changes(
    op: str, actual: Tensor, exact: Operations, lookup: Lookup, trace: dict[str, Tensor]
) -> Iterator[Change]:
    """Changed operations, the likeliest first."""
    inputs = [lookup(name).double() for name in input_names(op, exact.checkpoint.config)]
    match operation(op, exact.checkpoint.config).equation:
        case Equation.NORM:
            yield from _norm_changes(op, actual, exact, *inputs)
        case Equation.ROPE:
            yield from _rope_changes(op, exact, lookup, trace)
        case Equation.EMBEDDING | Equation.LINEAR:
            yield from _weight_changes(op, actual, exact, lookup)
        case Equation.ATTENTION:
            yield from _attention_changes(exact, *inputs)
        case Equation.SILU_MUL:
            yield from _activation_changes(*inputs)
        case Equation.EXPERTS:
            yield from _expert_changes(op, exact, *inputs)
        case Equation.LOGPROB:
            yield from _logprob_changes(exact, *inputs)
        case Equation.SUM:
            yield "it leaves the residual stream out", inputs[1]
            yield "it leaves the branch out: it is the residual stream before", inputs[0]
    expected = exact.compute(op, lookup)
    scale = float((actual * expected).sum() / expected.square().sum())
    yield f"its outputs are {scale:.4g} times the checkpoint's", scale * expected


def _norm_changes(op: str, actual: Tensor, exact: Operations, x: Tensor) -> Iterator[Change]:
    name = weight_names(op, exact.checkpoint)[0]
    w, eps = exact.weight(name), exact.checkpoint.config.eps
    yield "the norm is missing: its outputs are its inputs", x
    yield "the weight is not applied", exact.norm(x, torch.ones_like(w), eps)
    yield "the weight is applied as 1 + weight", exact.norm(x, 1 + w, eps)
    for other in (1e-6, 1e-5, 1e-8, 0.0, 1e-3, eps * 10, eps / 10, eps * 100, eps / 100):
        yield f"eps is {other:.1g}, the checkpoint's is {eps:.1g}", exact.norm(x, w, other)
    unweighted = exact.normalised(x, len(w), eps).reshape(-1, len(w))
    columns = actual.reshape(-1, len(w))
    fitted = (columns * unweighted).sum(0) / unweighted.square().sum(0).clamp_min(1e-300)
    # A fitted weight has the rounding of its few outputs; an element counts as another one beyond a tenth.
    other = ((fitted - w).abs() > 0.1 * w.abs()).nonzero().flatten().tolist()
    if other:
        first = (
            f"element {other[0]} is {float(fitted[other[0]]):.3g}, the checkpoint's {float(w[other[0]]):.3g}"
        )
        words = f"{len(other)} of {len(w)} elements of {name} have other values ({first})"
        yield words, (unweighted * fitted).reshape(x.shape)


def _rope_changes(op: str, exact: Operations, lookup: Lookup, trace: dict[str, Tensor]) -> Iterator[Change]:
    config, (prefix, _) = exact.checkpoint.config, split_name(op)
    (name,) = input_names(op, config)
    x, theta = lookup(name).double(), config.rope_theta
    yield "no position is encoded: its outputs are its inputs", x
    if config.rope_llama3 is not None:
        plain = rope_frequencies(config.head_dim, theta)
        yield "the scaling of the rotary embedding (llama3) is left out", exact.rope(x, plain)
    for other in (
        theta * 2,
        theta / 2,
        theta * 10,
        theta / 10,
        1e4,
        5e5,
        1e6,
        5e6,
        1e7,
        theta * 4,
        theta / 4,
    ):
        frequencies = replace(config, rope_theta=other).frequencies
        yield f"rope_theta is {other:g}, the checkpoint's is {theta:g}", exact.rope(x, frequencies)
    for shift in (1, -1, len(exact.prompt), -len(exact.prompt)):
        yield f"the positions are shifted by {shift:+d}", exact.rope(x, config.frequencies, shift)
    yield (
        "neighbouring elements are rotated in pairs, where the checkpoint rotates the halves of a head",
        exact.rope(x, config.frequencies, interleaved=True),
    )
    (norm,) = known_operation(op).reads
    has_norm = norm in operation(op, config).reads
    if not has_norm and prefix + norm in trace:
        normed = lookup(prefix + norm).double()
        yield f"{norm} comes before it, which the checkpoint lacks", exact.rope(normed, config.frequencies)
    if has_norm:
        (raw,) = input_names(prefix + norm, config)
        yield f"{norm} is missing before it", exact.rope(lookup(raw).double(), config.frequencies)


def _weight_changes(op: str, actual: Tensor, exact: Operations, lookup: Lookup) -> Iterator[Change]:
    """Changes of a matrix: rounded, taken from elsewhere, its bias left out, its heads in other places."""
    c, row = exact.checkpoint, operation(op, exact.checkpoint.config)
    name, bias = weight_names(op, c)
    w, b = c.weights[name], exact.weight(bias) if bias else None
    if row.equation is Equation.EMBEDDING:
        ids = torch.tensor([*exact.prompt, *exact.completion[:-1]], device=w.device)

        def output(weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return weight[ids].double()
    else:
        x = lookup(input_names(op, c.config)[0]).double()

        def output(weight: Tensor, bias: Tensor | None = b) -> Tensor:
            return linear(x, weight, bias)

    if row.fused == "qkv":
        yield from _moved_heads(actual, output(w), c.config.head_dim)
    for words, rounded in _roundings(w):
        yield f"{name} is rounded to {words}", output(rounded.to(w.dtype))
    if b is not None:
        yield f"{bias} is left out", output(w, None)
    for other in _siblings(op, name, exact):
        if other in c.weights and c.weights[other].shape == w.shape:
            yield f"it computes with {other}", output(c.weights[other])
    if w.dim() == 2 and w.shape[0] == w.shape[1]:
        yield f"{name} is transposed", output(w.T)


def _roundings(w: Tensor) -> Iterator[Change]:
    """A weight rounded to narrower formats, as quantised checkpoints and caches hold it."""
    wide = w.float()
    whole, rows = wide.abs().max(), wide.abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
    for name, dtype in (("fp8 e4m3", _E4M3), ("fp8 e5m2", _E5M2)):
        top = torch.finfo(dtype).max
        yield f"{name}, unscaled", wide.clamp(-top, top).to(dtype).float()
        for unit, largest in (("tensor", whole), ("row", rows)):
            scale = largest.clamp_min(1e-30) / top
            yield f"{name}, a scale for each {unit}", (wide / scale).to(dtype).float() * scale
    for bits in (8, 4):
        top = (1 << bits - 1) - 1
        yield f"int{bits}, a scale for each row", (wide / (rows / top)).round() * (rows / top)
    for dtype, name in _SHORT.items():
        yield name, w.to(dtype).float()


def _siblings(op: str, name: str, exact: Operations) -> list[str]:
    """Weights that could be taken for this one: of the same layer, and of layers nearby."""
    prefix, kind = split_name(op)
    group = [row.name for row in fused_with(op, exact.checkpoint.config) if row.name != kind]
    same = [weight_names(prefix + other, exact.checkpoint)[0] for other in group]
    if not prefix:
        return same
    layer = int(prefix.split(".")[1])
    low, high = max(0, layer - _NEIGHBOURS), min(exact.checkpoint.config.layers, layer + _NEIGHBOURS + 1)
    others = [f"layers.{i}.{kind}" for i in range(low, high) if i != layer]
    names = {*operation_names(exact.checkpoint.config)}
    return same + [weight_names(other, exact.checkpoint)[0] for other in others if other in names]


def _moved_heads(actual: Tensor, expected: Tensor, head_dim: int) -> Iterator[Change]:
    """The heads in other places: each head of the output is compared with all heads of the checkpoint's."""
    outputs, heads = (x.reshape(len(x), -1, head_dim) for x in (actual, expected))
    places = torch.cdist(outputs.transpose(0, 1).flatten(1), heads.transpose(0, 1).flatten(1)).argmin(dim=1)
    moved = [i for i, j in enumerate(places.tolist()) if i != j]
    if moved:
        sources = [int(places[i]) for i in moved]
        yield f"heads {moved} hold the checkpoint's heads {sources}", heads[:, places].reshape(expected.shape)


def _attention_changes(exact: Operations, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Change]:
    c = exact.checkpoint.config
    yield "no causal mask: tokens read later tokens", exact.attention(q, k, v, causal=False)
    usual = c.head_dim**-0.5
    scales = {
        "1": 1.0,
        "1 / head_dim": 1 / c.head_dim,
        "twice the usual": 2 * usual,
        "half the usual": usual / 2,
    }
    for words, scale in scales.items():
        yield f"the scores are scaled by {words}", exact.attention(q, k, v, scale)
    if 1 < c.kv_heads < c.heads:
        words = "query head i reads key-value head i modulo their number, and not its group's"
        yield words, exact.attention(q, k, v, tiled=True)
    for name, dtype in (("fp8 e4m3", _E4M3), ("fp8 e5m2", _E5M2)):
        k8, v8 = (x.to(dtype).double() for x in (k, v))
        yield f"keys and values are rounded to {name}: the cache's dtype", exact.attention(q, k8, v8)


def _activation_changes(gate: Tensor, up: Tensor) -> Iterator[Change]:
    yield "gate and up are exchanged", F.silu(up) * gate
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": F.gelu,
        "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "no activation": lambda x: x,
    }
    for name, activation in activations.items():
        yield f"the activation is {name}, the checkpoint's is silu", activation(gate) * up
    for dtype, name in _SHORT.items():
        yield f"silu is rounded to {name}", F.silu(gate.to(dtype)).double() * up
    yield "the gate is left out", up
    yield "the product with up is left out", F.silu(gate)


def _expert_changes(op: str, exact: Operations, x: Tensor, logits: Tensor) -> Iterator[Change]:
    c = exact.checkpoint.config.experts
    routings = {
        (
            "norm_topk_prob is lost: the routing weights are not divided by their sum"
            if c.renormalise
            else "the routing weights are divided by their sum, and norm_topk_prob is false"
        ): exact.routing(logits, renormalise=not c.renormalise),
        "of equally likely experts it takes the one with the higher index": exact.routing(
            logits, lower_wins=False
        ),
        "the routing weights are left out": (exact.routing(logits) > 0).to(exact.wide),
    }
    for dtype, name in _SHORT.items():
        routings[f"it chooses and weighs experts by router logits in {name}"] = exact.routing(
            logits.to(dtype)
        )
    for k in (c.per_token - 1, c.per_token + 1):
        if 1 <= k <= c.number:
            words = f"a token has {k} experts, the checkpoint's {c.per_token}"
            routings[words] = exact.routing(logits, per_token=k)
    for words, routing in routings.items():
        yield words, exact.experts(op, x, routing)


def _logprob_changes(exact: Operations, logits: Tensor) -> Iterator[Change]:
    params = exact.sampling_params
    changes = {
        "of the raw logits: no temperature and no filter is applied": SamplingParams(),
        "without the temperature": params._replace(temperature=1.0),
        "not renormalised after the cut": params.uncut,
    }
    for words, other in changes.items():
        if other != params:
            yield f"it is the log-probability {words}", exact.logprob(logits, other)


def _of_lower_precision(op: str, actual: Tensor, exact: Operations, lookup: Lookup) -> str:
    """Says so where the error is as large as that of the same operation in a narrower format."""
    expected = exact.compute(op, lookup)
    error = rms(actual - expected)
    for dtype, name in _SHORT.items():
        typical = rms(in_dtype(exact, dtype).compute(op, lookup).double() - expected)
        if typical / 3 <= error <= 3 * typical:
            of_fp32 = dtype is torch.float16 and lookup(op).dtype is torch.float32
            tf32 = _TF32 if of_fp32 and operation(op, exact.checkpoint.config).equation in _PRODUCTS else ""
            return f"its error is as large as if it were computed in {name}{tf32}"
    return ""
