"""Where a weight's gradient goes: straight into its fp32 buffer, or back to autograd.

A trainer gives each weight an fp32 tensor `main_grad` of the weight's shape. Backward functions then add to
it in canonical order and return nothing, so no gradient in a low precision and no sum over a whole batch ever
exists. Without `main_grad` the same sum starts from zero and is returned to autograd, rounded once to the
weight's dtype.
"""

import torch


def grad_buffer(weight: torch.Tensor) -> torch.Tensor:
    """The fp32 (fp64 for fp64 weights) tensor to add this weight's gradient to."""
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return torch.zeros(weight.shape, dtype=accumulate_dtype(weight.dtype), device=weight.device)
    return buffer


def returned_grad(weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor | None:
    """What a backward function returns for `weight` after it has added to `buffer`."""
    return None if getattr(weight, "main_grad", None) is buffer else buffer.to(weight.dtype)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: fp32, or fp64 when a test asks for an fp64 judge."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_dtype(op: str, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless all tensors share one of the supported dtypes."""
    supported = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    (first, x), *rest = tensors.items()
    if x.dtype not in supported:
        raise ValueError(f"{op}: {first}.dtype ({x.dtype}) must be float32, bfloat16, float16 or float64")
    for name, t in rest:
        if t.dtype != x.dtype:
            raise ValueError(
                f"{op}: {name}.dtype ({t.dtype}) must equal {first}.dtype ({x.dtype}); convert one of them"
            )
