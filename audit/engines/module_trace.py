"""The output of every module of a model, by hooks: the trace of a family whose operations have no names here.

The names are the modules' own, as in the checkpoint. Two sides are then compared by name and shape.

Shapes: T tokens of one sequence.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...verify.operation_outputs import Trace


def first_tensor(out: Any) -> torch.Tensor | None:
    """The first tensor of floats of what a module returned; None where it has none."""
    if isinstance(out, torch.Tensor):
        return out if out.is_floating_point() else None
    values = out.values() if isinstance(out, dict) else out if isinstance(out, tuple | list) else ()
    return next((x for part in values if (x := first_tensor(part)) is not None), None)


@contextmanager
def module_outputs(model: torch.nn.Module) -> Iterator[Trace]:
    """Inside this context the trace takes what each module returns at its first call, on the CPU.

    Outputs are [T, ...] of one sequence. A module that returns no tensor of floats is left out.
    """
    trace: Trace = {}

    def record(name: str) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _inputs: Any, out: Any) -> None:
            if name not in trace and (x := first_tensor(out)) is not None:
                x = x[0] if x.dim() > 2 and len(x) == 1 else x
                trace[name] = x.detach().reshape(len(x), -1).to("cpu", copy=True)

        return hook

    handles = [m.register_forward_hook(record(name)) for name, m in model.named_modules() if name]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
