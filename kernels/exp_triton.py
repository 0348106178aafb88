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
