"""The draw of a token from logits, with its log-probability: what a sampler does at the end of each turn.

    the first id at which the distribution function of exp(z) exceeds u, and its logp (logprob.py)

Shapes: logits [n, V] in the compute dtype or fp32; u, logp [n]; ids [n].
On Triton, draw_triton.py serves the draw from the whole vocabulary. Greedy draws, top-k, top-p and noise go
through logprob.py's functions. Both have the same bits, and neither waits for the GPU.
"""

import torch

from .backend import on_triton
from .logprob import drawn_logprobs, scaled_logits
from .sampling_params import SamplingParams


def draw_tokens(
    logits: torch.Tensor, u: torch.Tensor, params: SamplingParams, noise: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row, and its logp under the distribution it is drawn from.

    logits [n, V]; u [n] fp64 in [0, 1) -> ids [n] int64, logp [n] fp32. noise [n or fewer, V] fp32 is added
    to the scaled logits of the first rows. The logp of a row whose logits are not finite is NaN.
    """
    greedy = params.temperature == 0.0
    if on_triton(logits) and noise is None and not greedy and params.keeps_all(logits.shape[1]):
        from .draw_triton import draw_tokens as draw_tokens_triton

        return draw_tokens_triton(logits, u, params.temperature)
    z = scaled_logits(logits, params)
    if noise is not None:
        z[: len(noise)] += noise
    return drawn_logprobs(z, u, greedy)
