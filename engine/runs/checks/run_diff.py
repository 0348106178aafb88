"""`zerokl diff` of two runs, or of two traces: their first difference, in words. Logs: audit/logs/."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....files.inputs import read_bytes
from ....files.reading import shown
from ....verify.compare_runs import Comparison, compare_runs, open_run
from ....verify.difference import ABSENT, Difference, compare_values, first_in_order
from ...display.terminal import console
from ..folder import ROLLOUTS
from ..rollout_lines import parse_rollout
from .step_trace import is_trace, trace_differences


def diff(a: Path, b: Path) -> bool:
    """Print the first difference. Returns whether there is none. Raises ValueError for bad input."""
    if is_trace(a) != is_trace(b):
        raise ValueError(f"diff: {a} and {b} must both be runs or both be traces")
    if not is_trace(a):
        return _diff_runs(a, b)
    equal, lines = trace_differences(a, b)
    for line in lines:
        console.print(line)
    return equal


def _diff_runs(a: Path, b: Path) -> bool:
    comparison = compare_runs(open_run(a), open_run(b))
    first, *then = comparison.lines
    if comparison.difference is None:
        console.print(first)
        return comparison.equal
    console.print(f"first difference {first}")
    for line in then:
        console.print(line)
    if rollout := first_rollout(a, b, comparison.first_step):
        console.print(rollout)
    _explain(comparison)
    return False


def _explain(comparison: Comparison) -> None:
    """Print how the environments of the two runs differ."""
    if comparison.environment:
        console.print("differences in the environment that may explain it:")
        for line in comparison.environment:
            console.print(f"  {line}")
    elif comparison.difference.step is not None:
        console.print("no difference in the environment explains it")
    if comparison.lawful:
        console.print("differences that decide no bit, unless zerokl or the machine is at fault:")
        for line in comparison.lawful:
            console.print(f"  {line}")


# What rollouts.jsonl holds of a sequence, in causal order, and its words.
_FIELDS = {
    "prompt_ids": "prompt token",
    "completion_ids": "completion token",
    "mask": "mask",
    "turn_starts": "start of a turn",
    "logprobs": "logprob",
    "reward": "reward",
    "advantage": "advantage",
}


def first_rollout(a: Path, b: Path, step: int | None) -> str:
    """The first sequence of the step that differs in the rollouts.jsonl of both runs, and where it differs.

    Empty where there is no step, where a run has no such file, and where the files show no difference.
    """
    if step is None:
        return ""
    pairs = list(zip(_rollouts(a, step), _rollouts(b, step), strict=False))
    if (first := first_in_order(_FIELDS, pairs, _compare_field)) is None:
        return ""
    _, (line, _), difference = first
    place = ", ".join(f"{name} {shown(line.get(name))}" for name in ("prompt", "sample"))
    return str(replace(difference, place=place))


def _compare_field(field: str, x: dict[str, Any], y: dict[str, Any]) -> Difference | None:
    return compare_values(_FIELDS[field], x.get(field, ABSENT), y.get(field, ABSENT))


def _rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    """The lines of rollouts.jsonl for the step; `run` is a run folder or a ledger in it."""
    file = (run if run.is_dir() else run.parent) / ROLLOUTS
    names_step = re.compile(rb'"step"\s*:\s*%d\s*[,}]' % step)  # other lines need no parsing
    try:
        lines = (parse_rollout(line) for line in read_bytes(file).splitlines() if names_step.search(line))
        return [line for line in lines if line["step"] == step]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # the lines only help to find the place; the ledger has shown the difference without them
