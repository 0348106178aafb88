"""The draw of a token and its uniform number through the loops of cpp/draw.cpp, with the bits of draw.py and
philox.py, which explain the shapes.
"""

import torch

from .backend import on_cpp
from .cpp import call
from .cpp.row_sums import sum_lanes
from .order import SUM_TILE


def draw_on_cpp(z: torch.Tensor, leaves: int) -> bool:
    """Whether tokens are drawn here from z [T, V], with sums over V of so many leaves (leaves.py)."""
    width = z.shape[1] // leaves
    return on_cpp(z) and z.dtype == torch.float32 and z.shape[1] <= SUM_TILE and sum_lanes(width) > 0


def drawn_logprobs(z: torch.Tensor, u: torch.Tensor, leaves: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and logp of draw.drawn_logprobs, not greedy."""
    (T, V), z = z.shape, z.contiguous()
    shifted = torch.empty_like(z)
    call("draw_shift", None, z, shifted, T, V)
    ids, (logp, totals) = torch.empty(T, dtype=torch.int64), torch.empty(2, T, dtype=torch.float32)
    inputs, lanes = (shifted, torch.exp(shifted), u.contiguous()), sum_lanes(V // leaves)
    call("draw_ids", None, *inputs, ids, logp, totals, T, V, lanes, leaves)
    return ids, logp.sub_(totals.log_())


def uniforms(counter: torch.Tensor, seed: int, stream: int) -> torch.Tensor:
    """The numbers of uniforms.uniforms. counter [4, n] int64."""
    counter = counter.contiguous()
    u = torch.empty(counter.shape[1], dtype=torch.float64)
    call("uniforms", None, counter, u, len(u), seed, stream)
    return u
