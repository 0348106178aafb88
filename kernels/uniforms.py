"""The random numbers of philox.py, made on the device of their counters."""

import torch

from . import draw_cpp
from .backend import on_cpp, on_triton
from .philox import Stream, uniform


def uniforms_ref(counter: torch.Tensor, seed: int, stream: Stream) -> torch.Tensor:
    """The reference of uniforms."""
    return torch.from_numpy(uniform(counter.T.numpy(), seed, stream))


def uniforms(counter: torch.Tensor, seed: int, stream: Stream) -> torch.Tensor:
    """The numbers of `uniform`, made where the counters are.

    counter [4, n] int64, of 32-bit words -> [n] fp64. On Triton nothing waits for the GPU.
    """
    if on_triton(counter):
        from .philox_triton import uniforms as uniforms_triton

        return uniforms_triton(counter, seed, int(stream))
    if on_cpp(counter) and counter.dtype == torch.int64 and len(counter) == 4 and 0 <= seed < 1 << 32:
        return draw_cpp.uniforms(counter, seed, int(stream))
    return uniforms_ref(counter, seed, stream)
