"""Where two engines part, and why: one sequence through both, operation by operation.

Bits part first where some operation rounds otherwise, which is harmless. The error jumps where an operation
does something else than its checkpoint says (operation_errors.py). Only the second is a fault.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ...files.dtypes import dtype_name
from ...kernels.sampling_params import SamplingParams
from ...model.operation import STREAM
from ...model.operations import is_optional, known, known_operation, operation_names, split_name
from ...verify.operation_outputs import Trace, compare_traces, first_divergence, one_sided
from ..engines.engine import Engine, Pair
from ..sections import Jump, TraceSection
from .experts import experts_difference
from .explain import explain
from .operation_errors import OwnError, own_errors
from .other_checkpoint import compare_checkpoints, have_one_shape
from .plain_operations import Checkpoint, Operations

# Further operations at fault that a report lists by name.
_LISTED = 12


@dataclass(frozen=True)
class Side:
    """One of the two engines: its trace of the sequence, and the checkpoint that it should compute with."""

    name: str
    trace: Trace
    checkpoint: Checkpoint

    def own_errors(self, pair: Pair, params: SamplingParams, checkpoint: Checkpoint) -> list[OwnError]:
        """The own error of every operation, measured by a checkpoint of this side's shapes."""
        return own_errors(self.trace, Operations(checkpoint, *pair, params))


def locate(
    sampler: Engine,
    trainer: Engine,
    pair: Pair,
    params: SamplingParams,
    checkpoints: Sequence[Checkpoint],
    other: Checkpoint | None = None,
) -> TraceSection:
    """The part of the report on the operations of both engines over one sequence.

    checkpoints: of the sampler and of the trainer, each in its engine's dtype; without them own errors are
    left out. other: the trainer's checkpoint in the sampler's dtype, where the two are different
    checkpoints.
    """
    traces = sampler.trace(pair, params), trainer.trace(pair, params)
    same_shape = {n for n in traces[0].keys() & traces[1].keys() if traces[0][n].shape == traces[1][n].shape}
    comparable = [{n: x for n, x in t.items() if n in same_shape} for t in traces]
    only, first = one_sided(*traces), first_divergence(*comparable)
    section = TraceSection(
        operations=compare_traces(*comparable),
        first_divergence=first,
        one_sided={"sampler": only[0], "trainer": only[1]},
        other_shapes=[n for n in traces[0] if n in traces[1] and n not in same_shape],
        jump=None,
        remedy=_remedy(first.op) if first else "",
        traced_outside=sampler.traced_outside,
    )
    if not checkpoints:
        return section
    names = _names(sampler, trainer)
    sides = [Side(*each) for each in zip(names, traces, checkpoints, strict=True)]
    errors = [side.own_errors(pair, params, side.checkpoint) for side in sides]
    jump = _jump(sides, errors, [s.checkpoint for s in sides], pair, params)
    if jump is None and other is not None:
        jump = _jump_between(sides[0], other, pair, params)
    return replace(
        section,
        jump=jump,
        remedy=known_operation(jump.op).remedy if jump else section.remedy,
        experts=experts_difference(*traces, checkpoints[0]),
        own_errors=dict(zip(names, errors, strict=True)),
        checkpoints=None if other is None else compare_checkpoints(checkpoints[0], other),
    )


def _remedy(op: str) -> str:
    """What to do about an operation; of a module that has no name here, where to look."""
    if split_name(op)[1] in {row.name for _, _, row in known(1)}:
        return known_operation(op).remedy
    return f"Compare what the two engines compute in {op}, and which version and attention each has."


def _names(sampler: Engine, trainer: Engine) -> tuple[str, str]:
    """Names of the two sides, which differ."""
    if sampler.name != trainer.name:
        return sampler.name, trainer.name
    return f"{sampler.name} (sampler)", f"{trainer.name} (trainer)"


def _jump_between(side: Side, other: Checkpoint, pair: Pair, params: SamplingParams) -> Jump | None:
    """Where an engine, sound by its own checkpoint, does something else than the other checkpoint says."""
    if not have_one_shape(side.checkpoint.config, other.config):
        return None
    jump = _jump([side], [side.own_errors(pair, params, other)], [other], pair, params)
    return jump and replace(jump, between_checkpoints=True)


def _jump(
    sides: Sequence[Side],
    own_errors: Sequence[Sequence[OwnError]],
    yardsticks: Sequence[Checkpoint],
    pair: Pair,
    params: SamplingParams,
) -> Jump | None:
    """The first operation at fault, of either side, and what explains it; None where all are sound."""
    layers = max(checkpoint.config.layers for checkpoint in yardsticks)
    order = {op: i for i, op in enumerate(name for name, _, _ in known(layers))}
    faults = [(order[e.op], i, e) for i, errors in enumerate(own_errors) for e in errors if e.at_fault]
    if not faults:
        return None
    _, i, error = min(faults, key=lambda fault: fault[:2])
    others = [e.op for _, j, e in faults if j == i and e.op != error.op]
    exact = Operations(yardsticks[i], *pair, params)
    both = len(sides) > 1 and any(j != i and e.op == error.op for _, j, e in faults)
    return Jump(
        **asdict(error),
        engine=sides[i].name,
        dtype=dtype_name(sides[i].trace[error.op].dtype),
        explanation=explain(error.op, sides[i].trace, exact),
        absent=_absent(error.op, sides[i].trace, yardsticks[i]),
        both_engines=both,
        others=len(others),
        other_kinds=sorted({split_name(op)[1] for op in others}),
        other_operations=others[:_LISTED],
    )


def _absent(op: str, trace: Trace, checkpoint: Checkpoint) -> str:
    """The operation before this one that only the checkpoint or only the engine has; else empty."""
    prefix, _ = split_name(op)
    optional = [prefix + source for source in known_operation(op).reads if _is_optional(source)]
    names = operation_names(checkpoint.config)
    return next((x for x in optional if (x in trace) != (x in names)), "")


def _is_optional(source: str) -> bool:
    """Whether what an operation reads is one that only some models have."""
    return source != STREAM and is_optional(known_operation(source))
