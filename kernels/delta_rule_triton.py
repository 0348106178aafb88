"""The delta rule on Triton: its kernels in the order in which whole sequences, parts and gradients need them.

The backward computes the forward again, with the state of each chunk. recurrent_state.py::StateShape counts
its memory.
"""

import torch

from .delta_bwd_triton import delta_bwd
from .delta_rows_triton import PreparedRows
from .delta_walk_triton import delta_pairs, delta_walk
from .recurrent_state import CHUNK, AnySegments, RecurrentState, StateShape

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _walked(x: PreparedRows, places: int, keeps_all: bool) -> tuple[torch.Tensor, ...]:
    """The pairs, u, S and o of whole sequences, with so many places for u and S."""
    _, H, K, V = x.shape
    u = torch.empty(places, CHUNK, H, V, dtype=torch.float32, device=x.k.device)
    S = torch.zeros(places, H, K, V, dtype=torch.float32, device=x.k.device)
    pairs = delta_pairs(x)
    return pairs, u, S, delta_walk(x, pairs, u, S, keeps_all)


def delta_whole(inputs: Inputs, segments: AnySegments, shape: StateShape) -> torch.Tensor:
    """o [T, H, V] of whole sequences. inputs: qkv, a, b, A_log and dt_bias."""
    x = PreparedRows(*inputs, segments.on(inputs[0].device), shape)
    return _walked(x, len(x.tables.sequences), False)[-1]


def delta_continued(
    inputs: Inputs, segments: AnySegments, shape: StateShape, state: RecurrentState
) -> torch.Tensor:
    """o [T, H, V] of the new tokens; the slots then hold what comes after them."""
    x = PreparedRows(*inputs, segments.on(inputs[0].device), shape, state)
    o = delta_walk(x, delta_pairs(x), state.tensors["u"], state.tensors["start"], False)
    x.keep()
    return o


def delta_whole_bwd(
    do: torch.Tensor, inputs: Inputs, segments: AnySegments, shape: StateShape
) -> tuple[torch.Tensor, ...]:
    """As delta_bwd, of whole sequences."""
    x = PreparedRows(*inputs, segments.on(do.device), shape)
    pairs, u, S = _walked(x, len(x.tables.chunks), True)[:3]  # o is free
    return delta_bwd(do, *inputs[1:], x, pairs, u, S)
