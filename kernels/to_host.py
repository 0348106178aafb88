"""Results of a device that the host goes on with: they come by one copy, and their gradients return by one.

The host waits for the results, because it computes with them. Nobody waits for the gradient's copy
(upload.py). On a CPU nothing is copied.
"""

from collections.abc import Sequence

import torch

from .upload import Tables, upload_tables


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tables, *results):
        ctx.device, ctx.tables = results[0].device, tables
        # Clones: autograd lets nobody change a view of an output that has others.
        on_host = tuple(row.clone() for row in torch.stack(results).cpu())
        needs_grad = zip(on_host, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*(x for x, needed in needs_grad if not needed))
        return on_host

    @staticmethod
    def backward(ctx, *gradients):
        needed = ctx.needs_input_grad[1:]
        wanted = [dx for dx, is_needed in zip(gradients, needed, strict=True) if is_needed]
        placed = iter(upload_tables(ctx.device, ctx.tables, *wanted))
        return None, *(next(placed) if is_needed else None for is_needed in needed)


def to_host(results: Sequence[torch.Tensor], tables: Sequence[Tables] = ()) -> tuple[torch.Tensor, ...]:
    """The results on the host. All have one shape and one dtype.

    tables: what the backward reads on the device. It goes there by the same copy as the gradients of the
    results, so it may be made when these are known.
    """
    if results[0].device.type == "cpu":
        return tuple(results)
    return _ToHost.apply(tables, *results)
