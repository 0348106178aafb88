"""Results of a device that the host goes on with: they come by one copy, and the gradient returns by one.

The host waits for the results, because it computes with them. Nobody waits for the gradient's copy
(upload.py). On a CPU nothing is copied.
"""

from collections.abc import Sequence

import torch

from .upload import Tables, upload_tables


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, other, tables):
        ctx.device, ctx.tables = x.device, tables
        # Clones: autograd lets nobody change a view of an output that has others.
        x, other = (row.clone() for row in torch.stack([x, other]).cpu())
        ctx.mark_non_differentiable(other)
        return x, other

    @staticmethod
    def backward(ctx, dx, _):
        return *upload_tables(ctx.device, ctx.tables, dx), None, None


def to_host(
    x: torch.Tensor, other: torch.Tensor, tables: Sequence[Tables] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and other on the host. Both have one shape and one dtype. `other` has no gradient.

    tables: what the backward reads on the device. It goes there by the same copy as the gradient of x, so it
    may be made when this gradient is known.
    """
    return (x, other) if x.device.type == "cpu" else _ToHost.apply(x, other, tables)
