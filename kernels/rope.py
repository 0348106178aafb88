"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), half-split ("neox") layout.

    y1 = x1 cos - x2 sin,    y2 = x2 cos + x1 sin          x1, x2: first and second half of a head
    dx1 = dy1 cos + dy2 sin, dx2 = dy2 cos - dy1 sin

Shapes: x, y [T, H, D]; cos, sin [T, D/2]. cos and sin are rows of a table that is rounded to the model's
dtype (as vLLM and transformers keep it). They come in this dtype, or already converted to fp32.
Roundings: products and sums are in fp32. y and dx are rounded once.
The table is the one input that the devices make differently (decoder.py chooses). The reference computes it
in fp64 and rounds it once. A GPU computes it in fp32, as vLLM's models do, and so has vLLM's bits. In fp32
about half of the elements differ in their last bits, in bf16 up to 0.4% of them. The reference keeps fp64: an
fp32 table would change every weight that was trained on a CPU, and there torch's fp32 cos and sin may differ
between the vector body and the scalar tail.
"""

from collections.abc import Mapping
from typing import Any

import torch

from .backend import on_cpp, on_triton
from .grad import accumulate_dtype, check_dtype
from .heads_cpp import rotate as rotate_cpp
from .rope_scaling import attention_factor, scaled_frequencies_fp32

# Elements of one call of sin or cos. torch runs elementwise operations of up to 32,768 elements in one piece,
# and sin and cos may differ between pieces.
_TABLE_ELEMENTS = 32768


def rope_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The forward; with -sin it is the backward."""
    acc = accumulate_dtype(x.dtype)
    x1, x2 = x.to(acc).chunk(2, dim=-1)
    c, s = cos.to(acc).unsqueeze(1), sin.to(acc).unsqueeze(1)
    return torch.cat([(x1 * c).sub_(x2 * s), (x2 * c).add_(x1 * s)], dim=-1).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    if on_cpp(x):
        return rotate_cpp(x, cos, sin, inverse)
    if not on_triton(x):
        return rope_ref(x, cos, -sin if inverse else sin)
    from .rope_triton import rotate

    return rotate(x, cos, sin, inverse)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, sin, inverse=True), None, None


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head by the position of its token. x [T, H, D], cos and sin [T, D/2] -> [T, H, D].

    With narrower cos and sin, [T, R/2], the first R elements of a head are rotated, and the others pass.
    Raises ValueError on a bad shape or dtype.
    """
    R = 2 * cos.shape[-1]
    if x.dim() == 3 and 0 < R < x.shape[-1]:
        return torch.cat([rope(x[..., :R].contiguous(), cos, sin), x[..., R:]], dim=-1)
    is_converted = cos.dtype == sin.dtype == accumulate_dtype(x.dtype)
    check_dtype("rope", x=x, **({} if is_converted else {"cos": cos, "sin": sin}))
    half = (x.shape[0], x.shape[-1] // 2)
    if x.dim() != 3 or x.shape[-1] % 2 or cos.shape != half or sin.shape != half:
        raise ValueError(
            f"rope: x {tuple(x.shape)} must be [T, H, D] with even D, "
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} [T, D/2]"
        )
    return _Rope.apply(x, cos, sin) if torch.is_grad_enabled() else _rotate(x, cos, sin)


def rope_frequencies(head_dim: int, theta: float) -> list[float]:
    """The inverse frequencies theta^(-2 i / D) for i in 0 .. D/2 - 1, in radians per position, in fp64."""
    return [theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]


def rope_table(
    frequencies: list[float], positions: int, dtype: torch.dtype, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency, times `factor`: [positions, D/2].

    They are computed in fp64 and rounded once to `dtype`, in pieces of one fixed size, so that the bits do
    not depend on the number of threads.
    """
    f = torch.tensor(frequencies, dtype=torch.float64)
    rows = max(1, _TABLE_ELEMENTS // len(frequencies))
    cos, sin = [], []
    for start in range(0, positions, rows):
        angle = torch.arange(start, start + rows, dtype=torch.float64).unsqueeze(1) * f
        cos.append(torch.cos(angle).mul_(factor).to(dtype))
        sin.append(torch.sin(angle).mul_(factor).to(dtype))
    return torch.cat(cos)[:positions].contiguous(), torch.cat(sin)[:positions].contiguous()


def rope_table_fp32(
    dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table of vLLM's models: cos and sin, [positions, dim / 2], computed in fp32 and rounded to `dtype`.

    Frequencies, angles, cos and sin come from torch's operations on `device`. The operations are those of
    vllm/model_executor/layers/rotary_embedding/, one by one. On a GPU each element is a function of its own
    angle only. scaling: see rope_scaling.py.
    """
    f, factor = scaled_frequencies_fp32(dim, theta, scaling, device), attention_factor(scaling)
    position = torch.arange(positions, dtype=torch.float32, device=device)
    if scaling and scaling["rope_type"] == "linear":
        position = position / scaling["factor"]
    angle = position.unsqueeze(1) * f
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)
