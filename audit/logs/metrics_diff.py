"""The first difference of two files of metrics: JSON lines, JSON (a list, or TRL's log_history), CSV."""

import csv
import math
import re
from pathlib import Path
from typing import Any

from ...files.inputs import read_text
from ...files.reading import parse_json
from ..formats.lines import json_rows

# What a clock or a machine decides. Two equal runs differ in it.
_MACHINE = re.compile(
    r"time|duration|elapsed|throughput|per_sec|perf/|memory|runtime|timestamp|mfu|flops", re.I
)
_STEP = ("step", "global_step", "training/global_step", "_step", "iteration")
# A row of a log of rollouts has one of these; a row of metrics has none.
_ROLLOUT = {
    "prompt_ids",
    "token_ids",
    "tokens",
    "turns",
    "traces",
    "nodes",
    "samples",
    "input",
    "completion",
    "scope",
}
Row = dict[str, Any]


def is_metrics(path: Path) -> bool:
    """Whether a file holds metrics."""
    if not path.is_file() or path.suffix not in (".jsonl", ".json", ".csv"):
        return False
    if path.suffix != ".jsonl":
        return True
    _, first = next(json_rows(path), ("", {}))
    return bool(first) and not _ROLLOUT & first.keys()


def diff_metrics(a: Path, b: Path) -> tuple[str, str]:
    """The first difference in words, or "", and how much was compared.

    Rows are compared in their order. A metric that only one file has, and a metric of time or of the machine,
    is no difference. Raises ValueError for a file that cannot be read.
    """
    rows_a, rows_b = _rows(a), _rows(b)
    compared: set[str] = set()
    for index, (x, y) in enumerate(zip(rows_a, rows_b, strict=False)):
        step = next((f"step {x[name]}" for name in _STEP if name in x), f"row {index + 1}")
        for name in x:
            if name not in y or _MACHINE.search(name):
                continue
            compared.add(name)
            if not _equal(x[name], y[name]):
                return f"at {step}: {name} {x[name]!r} and {y[name]!r} (row {index + 1} of both)", ""
    if not compared:
        raise ValueError(f"{a} and {b} have no metric in common")
    if len(rows_a) != len(rows_b):
        return f"after row {min(len(rows_a), len(rows_b))}: {len(rows_a)} and {len(rows_b)} rows", ""
    return "", f"{len(compared)} metrics of {len(rows_a)} rows"


def _equal(x: Any, y: Any) -> bool:
    both_nan = isinstance(x, float) and isinstance(y, float) and math.isnan(x) and math.isnan(y)
    return both_nan or x == y


def _rows(path: Path) -> list[Row]:
    if path.suffix == ".jsonl":
        return [row for _, row in json_rows(path)]
    try:
        text = read_text(path)
        if path.suffix == ".csv":
            return list(csv.DictReader(text.splitlines()))
        content = parse_json(text, non_finite=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    if isinstance(content, dict):
        content = content.get("log_history", content)
    rows = [content] if isinstance(content, dict) else content
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is no list of metrics")
    return rows
