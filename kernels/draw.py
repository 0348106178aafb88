"""The draw of a token from logits, with its log-probability: what a sampler does at the end of each turn.

    the first id at which the distribution function of exp(z) exceeds u, and its logp (logprob.py)

Shapes: logits [n, V] in the compute dtype or fp32; z [n, V] in fp32, the scaled logits of logprob.py;
u, logp [n]; ids [n].
On Triton, draw_triton.py computes the draw from logits that are only divided. Greedy draws, filters and noise
go through `drawn_logprobs`. Both have the same bits, and neither waits for the GPU.
"""

import torch

from . import draw_cpp
from .backend import on_triton
from .draw_cpp import draw_on_cpp
from .leaves import WHOLE, Leaves
from .logprob import softmax_parts, token_logprobs
from .sampling_params import SamplingParams
from .truncation import prefix_sums, scaled_logits


def draw_tokens(
    logits: torch.Tensor,
    u: torch.Tensor,
    params: SamplingParams,
    noise: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    leaves: Leaves = WHOLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row, and its logp under the distribution it is drawn from.

    logits [n, V]; u [n] fp64 in [0, 1) -> ids [n] int64, logp [n] fp32. noise [n or fewer, V] fp32 is added
    to the scaled logits of the first rows. offset: see truncation.scaled_logits. leaves: of the sums
    over V, all in this rank. The logp of a row whose logits are not finite is NaN.
    """
    greedy = params.temperature == 0.0
    if on_triton(logits) and noise is None and not greedy and params.only_divides(logits.shape[1]):
        from .draw_triton import draw_tokens as draw_tokens_triton

        ids, logp = draw_tokens_triton(logits, u, params.temperature)
        if leaves.count > 1:
            from .logprob_triton import logprob_fwd

            logp = logprob_fwd(logits, ids, params.temperature, leaves)[0]
        return ids, logp
    z = scaled_logits(logits, params, offset)
    if noise is not None:
        z[: len(noise)] += noise
    return drawn_logprobs(z, u, greedy, leaves)


def draw(z: torch.Tensor, u: torch.Tensor, greedy: bool = False) -> torch.Tensor:
    """Draw one token for each row by inverting the distribution function.

    z [T, V], u [T] fp64 in [0, 1) -> ids [T]. The token of a row depends on the row's own z and u only (see
    logprob.prefix_sums). `greedy` takes the largest logit instead.
    """
    return z.argmax(dim=1) if greedy else _invert(torch.exp(z - z.amax(dim=1, keepdim=True)), u)


def drawn_logprobs(
    z: torch.Tensor, u: torch.Tensor, greedy: bool = False, leaves: Leaves = WHOLE
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of `draw`, and their logp of `logprob.token_logprobs`.

    z [T, V], u [T] -> ids [T], logp [T] in fp32. The reference computes one exponential for both.
    """
    if on_triton(z):
        ids = draw(z, u, greedy)
        return ids, token_logprobs(z, ids, leaves)[0]
    if not greedy and draw_on_cpp(z, leaves.count):
        return draw_cpp.drawn_logprobs(z, u, leaves.count)
    shifted, e, total = softmax_parts(z, leaves)
    ids = z.argmax(dim=1) if greedy else _invert(e, u)
    return ids, shifted.gather(1, ids.unsqueeze(1)).squeeze(1) - torch.log(total)


def _invert(e: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first token at which the distribution function of the weights e [T, V] exceeds u [T]."""
    cdf = prefix_sums(e)
    total = cdf[:, -1:]
    target = torch.minimum(u.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cdf, target, right=True).squeeze(1)
    # NaN logits would give an id out of bounds. A later check finds the NaN.
    return ids.clamp_(max=e.shape[1] - 1)
