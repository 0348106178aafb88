"""Results of a device that the host goes on with: they come by one copy, and their gradients return by one.

The host waits for the results, because it computes with them. Nobody waits for the gradient's copy
(upload.py). On a CPU nothing is copied.
"""

from collections.abc import Sequence

import torch

from .upload import Tables, upload_tables


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tables, others, *results):
        ctx.device, ctx.tables = results[0].device, tables
        packed = torch.cat([x.contiguous().view(torch.uint8).view(-1) for x in (*results, *others)]).cpu()
        # Clones: autograd lets nobody change a view of an output that has others. And each begins at an
        # address that its dtype may have.
        parts = [part.clone() for part in packed.split([x.nbytes for x in (*results, *others)])]
        typed = zip(parts, (*results, *others), strict=True)
        on_host = [part.view(x.dtype).view(x.shape) for part, x in typed]
        needed = (*ctx.needs_input_grad[2:], *[False] * len(others))
        needs_grad = zip(on_host, needed, strict=True)
        ctx.mark_non_differentiable(*(x for x, is_needed in needs_grad if not is_needed))
        return tuple(on_host)

    @staticmethod
    def backward(ctx, *gradients):
        needed = ctx.needs_input_grad[2:]
        wanted = [dx for dx, is_needed in zip(gradients, needed, strict=False) if is_needed]
        placed = iter(upload_tables(ctx.device, ctx.tables, *wanted))
        return None, None, *(next(placed) if is_needed else None for is_needed in needed)


def to_host(
    results: Sequence[torch.Tensor], tables: Sequence[Tables] = (), others: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, ...]:
    """The results on the host, and then the others, of any shapes and dtypes.

    tables: what the backward reads on the device. It goes there by the same copy as the gradients of the
    results, so it may be made when these are known. others: what has no gradient.
    """
    if results[0].device.type == "cpu":
        return *results, *others
    return _ToHost.apply(tables, others, *results)
