"""CUDA's expf, for Triton kernels that follow CUDA sources or torch. Triton's own exp is another function."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .backend import INTERPRETED

# The interpreter has no libdevice, and uses numpy's exp instead.
_OF_THE_INTERPRETER: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def expf(x):
    """exp(x) in fp32."""
    return tl.exp(x) if _OF_THE_INTERPRETER else libdevice.exp(x)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) in fp32."""
    return tl.div_rn(1.0, 1.0 + expf(-x))


@triton.jit
def silu(x):
    """x / (1 + e^-x) in fp32."""
    return tl.div_rn(x, 1.0 + expf(-x))
