"""Which operation of a trace does something else than its checkpoint says.

Each operation is computed again from the inputs that the trace itself holds, so an error of an earlier
operation does not count against a later one:

    own error   = rms(output - exact) / rms(exact)            exact: the operation in fp64
    sound error = the same for plain torch in the output's dtype

An operation is at fault where its own error is many times the sound one: over all its outputs, in one row (a
token), in one column (a head, a channel), or in what all outputs have in common (their size). Where none
is at fault, every operation did what the checkpoint says and rounded, and so did the whole forward.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ...model.operation import Equation
from ...model.operations import operation, operation_names
from ...verify.operation_outputs import Trace
from .plain_operations import Lookup, Operations, Tensor, cut

# Times the sound error from which an operation is at fault. Of sound engines (transformers with both kinds of
# attention, vLLM for CPUs, our kernels; fp32, bf16 and fp16) none was seen above 4, where outputs that are
# cut off count as such; rounding a weight to fp8 gives 10 and more.
FAULT = 8.0
# Times the sound error up to which a change of the operation explains its outputs.
FIT = FAULT / 2
# No output is more exact than half a unit in its last place, eps / 2 at most: in 16 bits that rounding is
# all there is. In fp32 the order of a long sum decides more than the rounding of its result.
_FLOOR, _FLOOR_FP32 = 1 / 4, 4.0
# Of eps too: the least that the outputs of a sound operation are too large or too small in common. In bf16
# a gain of a thousandth is then a fault, such as another epsilon of a norm, though each rounding is larger
# than that.
_GAIN = 1 / 64


@dataclass(frozen=True)
class OwnError:
    """The error of one operation, from its own inputs."""

    op: str
    relative: float  # rms of the error, relative to the rms of the exact output
    sound: float  # the same of plain torch in the same dtype
    factor: float  # how many times the sound error: over all outputs, or in the worst row or column
    # The outputs are cut off towards 0 and not rounded to the nearest number, as vLLM's kernels for CPUs do.
    # Then `factor` is the distance from the exact output, cut off.
    cut_off: bool = False

    @property
    def at_fault(self) -> bool:
        """Whether rounding does not explain the error."""
        return not self.factor <= FAULT


def own_errors(trace: Trace, exact: Operations, names: Iterable[str] = ()) -> list[OwnError]:
    """The own error of every operation of a trace, in the order of computation.

    exact: the checkpoint's operations in fp64. names: only these operations. An operation that the trace does
    not hold is computed where another one reads it. Raises ValueError for outputs of another shape.
    """
    lookup = recorded(trace, exact)
    chosen = set(names) or set(trace)
    return [
        own_error(op, trace[op].to(exact.checkpoint.device), exact, lookup)
        for op in operation_names(exact.checkpoint.config)
        if op in trace and op in chosen
    ]


def recorded(trace: Trace, exact: Operations) -> Lookup:
    """Looks outputs up in the trace. What it does not hold is computed in fp64."""

    def lookup(op: str) -> Tensor:
        if op not in trace:
            return exact.compute(op, lookup)
        return trace[op].to(exact.checkpoint.device)

    return lookup


def in_dtype(exact: Operations, dtype: torch.dtype) -> Operations:
    """The same operations in another dtype."""
    return Operations(exact.checkpoint, exact.prompt, exact.completion, exact.sampling_params, dtype)


def own_error(op: str, output: Tensor, exact: Operations, lookup: Lookup) -> OwnError:
    """The own error of one operation, whose inputs `lookup` finds."""
    expected = exact.compute(op, lookup)
    if expected.shape != output.shape:
        raise ValueError(
            f"audit: the outputs of {op} have shape {tuple(output.shape)}, "
            f"the checkpoint's {tuple(expected.shape)}"
        )
    plain = in_dtype(exact, output.dtype).compute(op, lookup).double()
    # Outside the dtype's range plain torch is infinite as well. A drawn token outside the kept set is counted
    # elsewhere.
    usable = plain.isfinite() & expected.isfinite()
    if operation(op, exact.checkpoint.config).equation is Equation.LOGPROB:
        usable &= output.isfinite()
    expected, plain = (torch.where(usable, x, 0.0) for x in (expected, plain))
    actual = torch.where(usable, output.double(), 0.0)
    size = max(rms(expected), torch.finfo(torch.float64).tiny)
    sound = plain - expected
    factor, cut_off = excess(actual, expected, sound, output.dtype), False
    if factor > FIT and output.dtype.itemsize == 2:
        # Experts may cut off what they keep between their products, too.
        inside = replace(exact, cut_inside=output.dtype).compute(op, lookup)
        ends = [expected, torch.where(usable, inside, 0.0)]
        factor_if_cut = min(excess(actual, cut(x, output.dtype), sound, output.dtype) for x in ends)
        if factor_if_cut <= min(FIT, factor / 2):
            factor, cut_off = factor_if_cut, True
    return OwnError(op, _number(rms(actual - expected) / size), _number(rms(sound) / size), factor, cut_off)


def excess(actual: Tensor, expected: Tensor, sound: Tensor, dtype: torch.dtype) -> float:
    """How many times a sound error the error of `actual` is, where that is largest.

    actual, expected, sound [T, width] fp64: an operation's output, what it should be, and the error of a
    sound computation in `dtype`.
    """
    error, size = actual - expected, max(rms(expected), torch.finfo(torch.float64).tiny)
    eps = torch.finfo(dtype).eps
    floor = eps * (_FLOOR_FP32 if dtype == torch.float32 else _FLOOR)
    typical = max(rms(sound) / size, floor)
    factors = [
        rms(error) / size / typical,
        _gain(error, expected) / max(_gain(sound, expected), typical * _averaged(expected), eps * _GAIN),
    ]
    if error.shape[1] > 1:
        factors += [
            _largest_rms(error, dim)
            / max(_largest_rms(sound, dim), floor * size, floor * _largest_rms(expected, dim))
            for dim in (0, 1)
        ]
    return max(map(_number, factors))


def rms(x: Tensor) -> float:
    """Root mean square. The largest element is taken out first, so that no square overflows."""
    largest = float(x.abs().max()) if x.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(float((x / largest).square().mean()))


def _gain(error: Tensor, expected: Tensor) -> float:
    """How much larger or smaller the error makes all outputs, as a share. Rounding averages out in it."""
    size = float(expected.square().sum())
    return abs(float((error * expected).sum())) / size if size else 0.0


def _averaged(expected: Tensor) -> float:
    """What is left of independent relative errors in _gain: sqrt(sum x^4) / sum x^2.

    It is 1 / sqrt(n) for n outputs of one size. A checkpoint may have a few outputs that are thousands of
    times larger than all others; then their rounding is the gain.
    """
    squares = (expected / max(float(expected.abs().max()), torch.finfo(torch.float64).tiny)).square()
    total = float(squares.sum())
    return math.sqrt(float(squares.square().sum())) / total if total else 1.0


def _largest_rms(x: Tensor, dim: int) -> float:
    """The largest root mean square along `dim`."""
    return math.sqrt(float(x.square().mean(dim=dim).max()))


def _number(x: float) -> float:
    return math.inf if math.isnan(x) else x
