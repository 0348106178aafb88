"""`zerokl diff`: the first difference of two runs or of two traces, in words."""

import json
from pathlib import Path
from typing import Any

from ...verify.divergence import Comparison, compare_runs, open_run
from ..runs.folder import ROLLOUTS
from ..runs.terminal import console
from .trace import compare_trace_files, is_trace


def diff(a: Path, b: Path) -> int:
    """Print the first difference. Returns 0 when there is none, else 1. Raises ValueError for bad input."""
    if is_trace(a) != is_trace(b):
        raise ValueError(f"diff: {a} and {b} must both be runs or both be traces")
    return _diff_traces(a, b) if is_trace(a) else _diff_runs(a, b)


def _diff_traces(a: Path, b: Path) -> int:
    found = compare_trace_files(a, b)
    if found.steps[0] != found.steps[1]:
        console.print(f"the traces are of steps {found.steps[0]} and {found.steps[1]}")
    if found.first is None:
        console.print(f"equal to the bit: {found.operations} operations")
        return 0
    d = found.first
    console.print(
        f"first difference: {d.op}{f', {found.row}' if found.row else ''}; {d.unequal} of {d.elements} outputs differ, by up to "
        f"{d.max_abs:.3g}" + (f" ({d.max_ulp} representable numbers)" if d.max_ulp is not None else "")
    )
    return 1


def _diff_runs(a: Path, b: Path) -> int:
    found = compare_runs(open_run(a), open_run(b))
    if found.equal:
        console.print(f"equal to the bit: {found.steps[0]} steps")
        return 0
    if found.divergence is None:
        console.print(
            f"equal to the bit as far as both go: {a} has {found.steps[0]} steps, {b} has {found.steps[1]}"
        )
        return 1
    console.print(f"first difference {found.divergence}")
    if found.divergence.step is None:
        console.print(
            f"then {found.later}" if found.later else "every step that both have is equal to the bit"
        )
    first = found.later or found.divergence
    if first.step is not None and (place := _first_rollout(a, b, first.step)):
        console.print(place)
    _explain(found)
    return 1


def _explain(found: Comparison) -> None:
    if found.environment:
        console.print("differences in the environment that may explain it:")
        for line in found.environment:
            console.print(f"  {line}")
    elif found.divergence and found.divergence.quantity not in ("configuration", "data", "first_weights"):
        console.print("no difference in the environment explains it")
    if found.lawful:
        console.print("differences that decide no bit, unless zerokl or the machine is at fault:")
        for line in found.lawful:
            console.print(f"  {line}")


# What rollouts.jsonl says of a sequence, in causal order.
_FIELDS = ("prompt_ids", "completion_ids", "logprobs", "reward", "advantage")


def _first_rollout(a: Path, b: Path, step: int) -> str:
    """The first sequence of the step that differs in the runs' own records, where they have them."""
    x, y = _rollouts(a, step), _rollouts(b, step)
    for name in _FIELDS:
        for one, other in zip(x, y, strict=False):
            if one.get(name) != other.get(name):
                return f"prompt {one['prompt']}, sample {one['sample']}: {name.replace('_', ' ')}{_position(one[name], other[name])}"
    return ""


def _position(one: Any, other: Any) -> str:
    if not isinstance(one, list):
        return f" {one!r} and {other!r}"
    at = next((i for i, (p, q) in enumerate(zip(one, other, strict=False)) if p != q), None)
    return (
        f" of {len(one)} and {len(other)}"
        if at is None
        else f" at position {at}: {one[at]!r} and {other[at]!r}"
    )


def _rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    file = (run if run.is_dir() else run.parent) / ROLLOUTS
    try:
        lines = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if line["step"] == step]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # a help, not the proof: the ledger has found the difference without it
