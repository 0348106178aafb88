"""x times a constant of the model (Granite's multipliers, Gemma's embedding).

    y = x factor;   dx = dy factor

Shapes: x, y of any shape. Roundings: the product is in fp32 (fp64 for fp64), and y and dx are rounded once.
Order: no sums. It is one multiplication of IEEE 754, so torch has the same bits on every device.
"""

import torch

from .grad import accumulate_dtype, check_dtype


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor, like x. Raises ValueError on a bad dtype."""
    check_dtype("scale", x=x)
    return (x.to(accumulate_dtype(x.dtype)) * factor).to(x.dtype)
