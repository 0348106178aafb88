"""Weights that a sampler has and its trainer has not: rounded to a dtype, or quantised.

`[perturb]` plants them in a run's sampler (engine/rollout/perturb.py). The audit predicts with them what a
log would hold (audit/faults/model/). So what a run plants is what the audit knows by name. Both know this
floor, and neither knows the other.

Shapes: weights [numel] of a layout (weights.py).
"""

import torch

from .compute_weights import quantise_all
from .quantisation import Quantisation
from .weights import FlatLayout

ROUNDED = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


@torch.no_grad()
def rounded_weights(layout: FlatLayout, weights: torch.Tensor, dtype: str) -> torch.Tensor:
    """The weights rounded to a dtype, a key of ROUNDED, in the dtype that they have.

    Buffers are left alone: an fp8 does not hold their bytes (buffers.py).
    """
    rounded, exact = weights.to(ROUNDED[dtype]).to(weights.dtype), layout.checkpoint_views(weights)
    for name in layout.buffers:
        layout.checkpoint_views(rounded)[name].copy_(exact[name])
    return rounded


@torch.no_grad()
def quantised_weights(
    layout: FlatLayout, weights: torch.Tensor, how: Quantisation, source: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weights with quantised matrices (quantisation.py), in the dtype that they have.

    source: the dtype that a matrix is rounded to before.
    """
    flat = weights.clone()
    quantise_all(layout.checkpoint_views(flat), how, source)
    return flat
