"""What an operation at fault computes instead: changed operations are tried, and the one that fits is named.

A change fits where the operation, computed with it in fp64 from the same inputs, differs from the engine's
output by no more than rounding. So "rope_theta is 20000" is a finding, and not a guess.
"""

from collections.abc import Iterator

import torch

from ...model.operation import Equation
from ...model.operations import operation
from ..faults.all_faults import changed_operations
from ..faults.changed_operation import SHORT, Change, Traced
from .operation_errors import FIT, excess, in_dtype, recorded, rms
from .plain_operations import Lookup, Operations, Tensor

# In TF32 a factor of an fp32 product has float16's 11 bits; vLLM's attention on a GPU is an example.
_PRODUCTS = {Equation.LINEAR, Equation.ATTENTION, Equation.EXPERTS}
_TF32 = ", or with products in TF32, which is Triton's default on a GPU (TRITON_F32_DEFAULT=ieee is fp32)"


def explain(op: str, trace: dict[str, Tensor], exact: Operations) -> str:
    """What an engine computes instead of the checkpoint's operation, in words; empty where nothing fits."""
    lookup = recorded(trace, exact)
    actual = trace[op].to(exact.checkpoint.device).double()
    if not actual.isfinite().all():
        return f"{int((~actual.isfinite()).sum())} of its {actual.numel()} outputs are infinite or NaN"
    if not actual.any():
        return "all its outputs are 0: its weight was not loaded, or was set to 0"
    dtype = trace[op].dtype
    expected = exact.compute(op, lookup)
    sound = in_dtype(exact, dtype).compute(op, lookup).double() - expected
    fits = [
        (excess(actual, output, sound, dtype), words)
        for words, output in _changes(Traced(op, actual, exact, lookup, trace))
        if output.shape == actual.shape
    ]
    best = min(error for error, _ in fits)
    if best <= FIT:
        # The likeliest of those that fit about as well: a fitted weight always fits a little better.
        return next(words for error, words in fits if error <= max(1.5, 2 * best))
    return _of_lower_precision(op, actual, exact, lookup)


def _changes(traced: Traced) -> Iterator[Change]:
    """Changed operations, the likeliest first."""
    if changed := changed_operations().get(operation(traced.op, traced.exact.checkpoint.config).equation):
        yield from changed.changes(traced)
    expected = traced.exact.compute(traced.op, traced.lookup)
    scale = float((traced.actual * expected).sum() / expected.square().sum())
    yield f"its outputs are {scale:.4g} times the checkpoint's", scale * expected


def _of_lower_precision(op: str, actual: Tensor, exact: Operations, lookup: Lookup) -> str:
    """Says so where the error is as large as that of the same operation in a narrower format."""
    expected = exact.compute(op, lookup)
    error = rms(actual - expected)
    for dtype, name in SHORT.items():
        typical = rms(in_dtype(exact, dtype).compute(op, lookup).double() - expected)
        if typical / 3 <= error <= 3 * typical:
            like_tf32 = dtype is torch.float16 and lookup(op).dtype is torch.float32
            tf32 = _TF32 if like_tf32 and operation(op, exact.checkpoint.config).equation in _PRODUCTS else ""
            return f"its error is as large as if it were computed in {name}{tf32}"
    return ""
