"""`zerokl diff`: the first difference of two runs, or of two traces, in words. Logs: audit/logs/diff.py."""

import re
from pathlib import Path
from typing import Any

from ....files.inputs import read_bytes
from ....files.reading import one_line, shown
from ....verify.distance import ulp_words
from ....verify.divergence import Comparison, compare_runs, open_run
from ...display.terminal import console
from ..folder import ROLLOUTS
from ..rollout_lines import parse_rollout
from .trace import compare_trace_files, is_trace


def diff(a: Path, b: Path) -> int:
    """Print the first difference. Returns 0 when there is none, else 1. Raises ValueError for bad input."""
    if is_trace(a) != is_trace(b):
        raise ValueError(f"diff: {a} and {b} must both be runs or both be traces")
    return _diff_traces(a, b) if is_trace(a) else _diff_runs(a, b)


def _diff_traces(a: Path, b: Path) -> int:
    comparison = compare_trace_files(a, b)
    if comparison.moments[0] != comparison.moments[1]:
        console.print("the traces are of " + " and of ".join(comparison.moments))
    if comparison.first is None:
        console.print(f"equal to the bit: {comparison.operations} operations")
        return 0
    d = comparison.first
    row = f", {comparison.row}" if comparison.row else ""
    ulp = f" ({words})" if (words := ulp_words(d.max_ulp)) else ""
    console.print(
        f"first difference: {one_line(d.op)}{row}; {d.unequal} of {d.elements} outputs differ, "
        f"by up to {d.max_abs:.3g}{ulp}"
    )
    return 1


def _diff_runs(a: Path, b: Path) -> int:
    comparison = compare_runs(open_run(a), open_run(b))
    divergence, later = comparison.divergence, comparison.later
    if comparison.equal:
        console.print(f"equal to the bit: {comparison.steps[0]} steps")
        return 0
    if divergence is None:
        steps_a, steps_b = comparison.steps
        console.print(f"equal to the bit as far as both go: {a} has {steps_a} steps, {b} has {steps_b}")
        return 1
    console.print(f"first difference {divergence}")
    if divergence.step is None:
        console.print(f"then {later}" if later else "every step that both have is equal to the bit")
    first = later or divergence
    if first.step is not None and (rollout := first_rollout(a, b, first.step)):
        console.print(rollout)
    _explain(comparison)
    return 1


def _explain(comparison: Comparison) -> None:
    """Print how the environments of the two runs differ."""
    divergence = comparison.divergence
    if comparison.environment:
        console.print("differences in the environment that may explain it:")
        for line in comparison.environment:
            console.print(f"  {line}")
    elif divergence and divergence.quantity not in ("configuration", "data", "first_weights"):
        console.print("no difference in the environment explains it")
    if comparison.lawful:
        console.print("differences that decide no bit, unless zerokl or the machine is at fault:")
        for line in comparison.lawful:
            console.print(f"  {line}")


# What rollouts.jsonl holds of a sequence, in causal order.
_FIELDS = ("prompt_ids", "completion_ids", "mask", "turn_starts", "logprobs", "reward", "advantage")


def first_rollout(a: Path, b: Path, step: int) -> str:
    """The first sequence of the step that differs in the rollouts.jsonl of both runs, and where it differs.

    Empty where a run has no such file, or where the files show no difference.
    """
    rollouts_a, rollouts_b = _rollouts(a, step), _rollouts(b, step)
    for name in _FIELDS:
        for x, y in zip(rollouts_a, rollouts_b, strict=False):
            if x.get(name) != y.get(name):
                place = f"prompt {x['prompt']}, sample {x['sample']}"
                return f"{place}: {name.replace('_', ' ')}{_position(x.get(name), y.get(name))}"
    return ""


def _position(x: Any, y: Any) -> str:
    """Where two values of a field differ: lists at a position or in their length, other values as such."""
    if not isinstance(x, list):
        return f" {shown(x)} and {shown(y)}"
    index = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), None)
    if index is None:
        return f" of {len(x)} and {len(y)}"
    return f" at position {index}: {shown(x[index])} and {shown(y[index])}"


def _rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    """The lines of rollouts.jsonl for the step; `run` is a run folder or a ledger in it."""
    file = (run if run.is_dir() else run.parent) / ROLLOUTS
    of_step = re.compile(rb'"step"\s*:\s*%d\s*[,}]' % step)  # other lines need no parsing
    try:
        lines = (parse_rollout(line) for line in read_bytes(file).splitlines() if of_step.search(line))
        return [line for line in lines if line["step"] == step]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # the lines only help to find the place; the ledger has shown the difference without them
