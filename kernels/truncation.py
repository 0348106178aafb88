"""The logits of the distribution that a token is drawn from, after every filter.

    z = (logits + offset) / temperature,  z_v = -inf outside the kept set (min-p, then top-k, then top-p)
    offset_v = bias_v for an allowed token, -inf for any other

Min-p keeps every logit that is not below max z + log(min_p), so every token whose probability is not below
min_p times the largest. Top-k keeps every logit that is not below the k-th largest. Top-p keeps the smallest
set of largest probabilities whose sum reaches top_p, and at least one token. Each of them looks only at what
the filter before it has kept. With temperature 0 nothing is divided, and no token is left out as unlikely.

The order is vLLM's: v1/sample/sampler.py, Sampler.apply_logits_processors (allowed tokens, then the bias) and
Sampler.sample (temperature, min-p, then top-k and top-p by v1/sample/ops/topk_topp_sampler.py,
apply_top_k_top_p). Min-p is in v1/sample/logits_processor/builtin.py, MinPLogitsProcessor.apply, on
probabilities. On logits, as here, it is in v1/worker/gpu/sample/min_p.py, _min_p_kernel. The two differ only
where a rounding decides.

Shapes: logits, z [T, V]; offset [V]. The gradient of a logit is that of z over the temperature: the offset is
a constant, and so is the kept set.
Roundings: everything is in fp32, the prefix sums in fp64. A bias is rounded once to fp32, its sum with the
logit once, and log(min_p) and its sum with the maximum once each.
GPU: the prefix sums are a Triton kernel (logprob_triton.py). The other operations are torch's: a sort,
maxima, comparisons and elementwise operations, which are exact or depend on their own row only.
"""

import math
from collections.abc import Callable

import torch

from .backend import on_triton
from .grad import accumulate_dtype
from .sampling_params import SamplingParams
from .upload import upload

Tensor = torch.Tensor


def prefix_sums_ref(e: Tensor) -> Tensor:
    """Prefix sums along each row in fp64, added one element after another. [T, V] -> [T, V]."""
    return torch.cumsum(e.double(), dim=1)


def prefix_sums(e: Tensor) -> Tensor:
    """Prefix sums along each row; on Triton they have a common factor. [T, V] -> [T, V].

    The prefix sums of a row depend on this row only.
    """
    if on_triton(e):
        from . import logprob_triton

        return logprob_triton.prefix_sums(e)
    return prefix_sums_ref(e)


def logit_offset(params: SamplingParams, V: int, device: torch.device) -> Tensor | None:
    """The offset [V] fp32 of these equations; None where no token is biased or left out by its id.

    A copy from the host makes it, so what is captured in a CUDA graph needs it made before. The other logits
    keep their bits, those of a zero included, because x + -0.0 = x.
    """
    if not params.changes_logits:
        return None
    allowed = params.allowed_token_ids
    offset = torch.full((V,), -0.0 if allowed is None else float("-inf"))
    if allowed is not None:
        offset[list(allowed)] = -0.0
    if params.logit_bias:
        ids, bias = zip(*params.logit_bias, strict=True)
        offset[list(ids)] += torch.tensor(bias)
    return upload(device, offset)[0]


def scaled_logits_ref(logits: Tensor, params: SamplingParams) -> Tensor:
    """The reference of scaled_logits."""
    return _scaled(logits, params, logit_offset(params, logits.shape[1], logits.device), prefix_sums_ref)


def scaled_logits(logits: Tensor, params: SamplingParams, offset: Tensor | None = None) -> Tensor:
    """z of these equations, in fp32. logits [T, V] -> [T, V].

    offset: from logit_offset, where the caller has made it before.
    """
    if offset is None:
        offset = logit_offset(params, logits.shape[1], logits.device)
    return _scaled(logits, params, offset, prefix_sums)


def _scaled(
    logits: Tensor, params: SamplingParams, offset: Tensor | None, row_prefix_sums: Callable[[Tensor], Tensor]
) -> Tensor:
    z = logits.to(accumulate_dtype(logits.dtype))
    if offset is not None:
        z = z + offset
    if params.temperature not in (0.0, 1.0):
        # The divisor is a tensor: torch may turn a Python scalar into a product with its reciprocal. It is
        # filled where it lies, because a CUDA graph cannot hold a copy from the host.
        z = z / z.new_full((), params.temperature)
    if not params.truncates:
        return z
    if params.min_p > 0.0:
        threshold = z.amax(dim=1, keepdim=True) + z.new_full((), math.log(params.min_p))
        z = z.masked_fill(z < threshold, float("-inf"))
    by_rank = 0 < params.top_k < z.shape[1] or params.top_p < 1.0
    return _truncated(z, params, row_prefix_sums) if by_rank else z


def _truncated(z: Tensor, params: SamplingParams, row_prefix_sums: Callable[[Tensor], Tensor]) -> Tensor:
    """z [T, V] after top-k and top-p."""
    ascending, index = torch.sort(z, dim=1, stable=True)
    drop = torch.zeros_like(ascending, dtype=torch.bool)
    if 0 < params.top_k < z.shape[1]:
        drop |= ascending < ascending[:, -params.top_k].unsqueeze(1)
    if params.top_p < 1.0:
        kept = ascending.masked_fill(drop, float("-inf"))
        below = row_prefix_sums(torch.exp(kept - kept[:, -1:]))
        drop |= below <= (1.0 - params.top_p) * below[:, -1:]
        drop[:, -1] = False
    return z.masked_fill(torch.zeros_like(drop).scatter_(1, index, drop), float("-inf"))
