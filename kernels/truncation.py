"""Temperature, top-k and top-p: the logits of the distribution that a token is drawn from.

    z = logits / temperature,  z_v = -inf outside the kept set (top-k, then top-p)

Top-k keeps every logit that is not below the k-th largest. Top-p keeps the smallest set of largest
probabilities whose sum reaches top_p, and at least one token (vLLM's apply_top_k_top_p). With temperature 0
nothing is divided.

Shapes: logits, z [T, V]. Roundings: everything is in fp32, the prefix sums in fp64.
GPU: the prefix sums are a Triton kernel (logprob_triton.py). The other operations are torch's: a sort,
comparisons and elementwise operations, which are exact or depend on their own row only.
"""

from collections.abc import Callable

import torch

from .backend import on_triton
from .grad import accumulate_dtype
from .sampling_params import SamplingParams

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


def scaled_logits_ref(logits: Tensor, params: SamplingParams) -> Tensor:
    """The reference of scaled_logits."""
    return _scaled(logits, params, prefix_sums_ref)


def scaled_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """z of these equations, in fp32. logits [T, V] -> [T, V]."""
    return _scaled(logits, params, prefix_sums)


def _scaled(logits: Tensor, params: SamplingParams, row_prefix_sums: Callable[[Tensor], Tensor]) -> Tensor:
    z = logits.to(accumulate_dtype(logits.dtype))
    if params.temperature not in (0.0, 1.0):
        # The divisor is a tensor: torch may turn a Python scalar into a product with its reciprocal. It is
        # filled where it lies, because a CUDA graph cannot hold a copy from the host.
        z = z / z.new_full((), params.temperature)
    if params.keeps_all(z.shape[1]):
        return z
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
