"""Triton kernels of add_shared.py. One program for each token.

Forward and ds: no sums. dz: the products of a row are summed over tiles of 1024 columns, in ascending order.

Shapes, roundings: see add_shared.py.
Order: the tile and the warps order the sum of dz, so both are constants.
"""

import torch
import triton
import triton.language as tl

from .exp_triton import expf
from .launch import dense, launch

# As in rms_norm_triton.py: each thread sums its 8 columns.
TILE, WARPS = 1024, 4


@triton.jit
def _add_shared_fwd(e_ptr, s_ptr, z_ptr, y_ptr, D, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    g = tl.div_rn(1.0, 1.0 + expf(-1.0 * tl.load(z_ptr + row + tl.arange(0, 1)).to(tl.float32)))
    for start in range(0, D, TILE):
        cols = start + tl.arange(0, TILE)
        mask = cols < D
        e = tl.load(e_ptr + row * D + cols, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + row * D + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * D + cols, (e + g * s).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_shared_bwd(dy_ptr, s_ptr, z_ptr, ds_ptr, dz_ptr, D, TILE: tl.constexpr):
    row, one = tl.program_id(0).to(tl.int64), tl.arange(0, 1)
    g = tl.div_rn(1.0, 1.0 + expf(-1.0 * tl.load(z_ptr + row + one).to(tl.float32)))
    total = tl.zeros([1], dtype=tl.float32)
    for start in range(0, D, TILE):
        cols = start + tl.arange(0, TILE)
        mask = cols < D
        dy = tl.load(dy_ptr + row * D + cols, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + row * D + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(ds_ptr + row * D + cols, (g * dy).to(ds_ptr.dtype.element_ty), mask=mask)
        total += tl.sum(dy * s)
    dz = g * (1.0 - g) * total
    tl.store(dz_ptr + row + one, dz.to(dz_ptr.dtype.element_ty))


def add_shared_fwd(e: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """e + sigmoid(z) s, [T, D]. e, s [T, D]; z [T, 1]."""
    e, (T, D) = dense(e), e.shape
    y = torch.empty_like(e)
    if T:
        launch(_add_shared_fwd, (T,), e, dense(s), dense(z), y, D, TILE=TILE, num_warps=WARPS)
    return y


def add_shared_bwd(dy: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ds [T, D] and dz [T, 1], in the dtype of s."""
    s, z, (T, D) = dense(s), dense(z), s.shape
    ds, dz = torch.empty_like(s), torch.empty_like(z)
    if T:
        launch(_add_shared_bwd, (T,), dense(dy), s, z, ds, dz, D, TILE=TILE, num_warps=WARPS)
    return ds, dz
