"""Sinks of attention on a GPU: how a row's walk over its keys ends with one, and the sinks' gradient.

    M = max(m, z)   a = exp(m - M)   L = fma(l, a, exp(z - M))   A = a acc      dz = -exp(z - lse) (do . o)

attention_sinks.py has the gradient, and chunk_state_triton.py what joins a sink to chunks.

Shapes: z, dz, lse [T, H] in fp32, contiguous; o, do [T, H, D].
Roundings: dz is not rounded. The fma is written out, because a compiler may fuse a sum in one kernel only.
Order: do . o is a tree of the width of a head. A row of dz depends on its own row only.
"""

import torch
import triton
import triton.language as tl

from .launch import ceil_div, dense, launch, next_power_of_2

# Rows of one program, and its warps. They lay out the sum of a row, so they are constants.
_ROWS, _WARPS = 16, 4


@triton.jit
def join_sink(m, l, acc, z):
    """A row's state after its sink z. m, l, z [ROWS], acc [ROWS, D]."""
    high = tl.maximum(m, z)
    a = tl.exp(m - high)
    return high, tl.fma(l, a, tl.exp(z - high)), acc * a[:, None]


@triton.jit
def _sinks_bwd(
    do_ptr,
    o_ptr,
    lse_ptr,
    z_ptr,
    dz_ptr,
    n,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    used = row < n
    mask = used[:, None] & (d < D)[None, :]
    place = (row * D)[:, None] + d[None, :]
    do = tl.load(do_ptr + place, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + place, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + row, mask=used, other=0.0)
    z = tl.load(z_ptr + row, mask=used, other=0.0)
    tl.store(dz_ptr + row, -tl.exp(z - lse) * tl.sum(do * o, axis=1), mask=used)


def sinks_bwd(do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of the sinks, [T, H] in fp32. do, o [T, H, D]; lse, sinks [T, H] in fp32."""
    n, D = lse.numel(), o.shape[2]
    dz = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    launch(
        _sinks_bwd,
        (ceil_div(n, _ROWS),),
        *map(dense, (do, o, lse, sinks)),
        dz,
        n,
        D=D,
        WIDTH=next_power_of_2(D),
        ROWS=_ROWS,
        num_warps=_WARPS,
    )
    return dz
