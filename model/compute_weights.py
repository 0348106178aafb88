"""The weights that a forward computes with, from the master weights: rounded to a dtype, then quantised."""

from collections.abc import Mapping

import torch

from ..kernels.quantise import quantise
from .quantisation import Quantisation, is_quantised
from .weights import FlatLayout


def quantise_all(
    tensors: Mapping[str, torch.Tensor], how: Quantisation, source: torch.dtype | None = None
) -> None:
    """Quantise, in place, the tensors that are quantised (quantisation.py), each with scales of its own.

    tensors: of a checkpoint, by their names there. The result is rounded once to a tensor's dtype. source: a
    dtype that they are rounded to before.
    """
    for name, w in tensors.items():
        if is_quantised(name):
            w.copy_(quantise(w.to(source or w.dtype), *how))


@torch.no_grad()
def compute_weights(
    layout: FlatLayout, weights: torch.Tensor, dtype: torch.dtype, how: Quantisation | None
) -> torch.Tensor:
    """A tensor of its own, [layout.numel] in `dtype`, from `weights` [layout.numel].

    They are quantised from what they are in `dtype`, as an engine quantises a checkpoint in this dtype. how:
    None leaves this out.
    """
    flat = weights.to(dtype, copy=True)
    if how is not None:
        quantise_all(layout.checkpoint_views(flat), how)
    return flat
