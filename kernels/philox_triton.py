"""Triton kernel of philox.py: ten rounds of Philox 4x32 for each counter, in integers only.

The number is the same as the host's: both halves of the product of two 32-bit words are exact, and 53 random
bits are exact in fp64.
"""

import torch
import triton
import triton.language as tl

from .launch import ceil_div, launch

ROWS = 128


@triton.jit(
    do_not_specialize=["n", "stride", "seed", "stream"], do_not_specialize_on_alignment=["counter_ptr"]
)
def _uniforms(counter_ptr, u_ptr, n, stride, seed, stream, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < n
    c0 = tl.load(counter_ptr + row, mask=mask, other=0).to(tl.uint32)
    c1 = tl.load(counter_ptr + stride + row, mask=mask, other=0).to(tl.uint32)
    c2 = tl.load(counter_ptr + 2 * stride + row, mask=mask, other=0).to(tl.uint32)
    c3 = tl.load(counter_ptr + 3 * stride + row, mask=mask, other=0).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), stream.to(tl.uint32)
    c0, c1, c2, c3 = tl.philox_impl(c0, c1, c2, c3, k0, k1, 10)
    high, low = (c0 >> 5).to(tl.int64), (c1 >> 6).to(tl.int64)
    u = (high * 67108864 + low).to(tl.float64) * 1.1102230246251565e-16  # 2^26 and 2^-53
    tl.store(u_ptr + row, u, mask=mask)


def uniforms(counter: torch.Tensor, seed: int, stream: int) -> torch.Tensor:
    """The numbers of uniforms.uniforms. counter [4, n] int64, with contiguous rows."""
    n = counter.shape[1]
    assert n == 1 or counter.stride(1) == 1, counter.stride()
    u = torch.empty(n, dtype=torch.float64, device=counter.device)
    seed -= seed >> 31 << 32  # its 32 bits as a signed number: one binary serves all seeds
    launch(
        _uniforms,
        (ceil_div(n, ROWS),),
        counter,
        u,
        n,
        counter.stride(0),
        seed,
        stream,
        ROWS=ROWS,
        num_warps=4,
    )
    return u
