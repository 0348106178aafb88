"""Files of metrics: JSON lines, JSON (a list, or the log_history of a trainer_state.json), CSV."""

import csv
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...files.inputs import read_text
from ...files.reading import parse_json
from ..formats.lines import json_rows
from ..frameworks import LOGS

# What a clock or a machine decides. Two equal runs differ in it.
MACHINE = re.compile(
    r"time|timing|duration|elapsed|throughput|per_sec|perf/|memory|runtime|timestamp|mfu|flops|wall", re.I
)
LEARNING_RATE = re.compile(r"(^|[/_.])(lr|learning_rate)([/_.]|$)", re.I)
LOSS_SCALE = re.compile(r"^scale$|(loss|grad|amp|fp16|scaler|scaling)[/_.]?.*scale$", re.I)
GRADIENT_NORM = re.compile(r"grad.*norm", re.I)
STEPS = ("step", "global_step", "training/global_step", "_step", "iteration")
# A row of a log of rollouts has one of these, which is no number; a row of metrics has none.
_MARKS = {mark for log in LOGS.values() for mark in log.marks}
# Names of JSON files in a folder that hold metrics; others are configurations.
_JSON = re.compile(r"metrics|trainer_state|log_history|training_log", re.I)
Row = dict[str, Any]


def is_metrics(path: Path) -> bool:
    """Whether a file holds metrics."""
    if not path.is_file() or path.suffix not in (".jsonl", ".json", ".csv"):
        return False
    if path.suffix != ".jsonl":
        return True
    _, first = next(json_rows(path), ("", {}))
    return bool(first) and not any(isinstance(first.get(mark), str | list | dict) for mark in _MARKS)


def metric_files(folder: Path) -> list[Path]:
    """The files of metrics below a folder. The last one is the newest: that of checkpoint-10 after -2."""
    files = [file for file in folder.rglob("*") if file.suffix != ".json" or _JSON.search(file.name)]

    def order(file: Path) -> tuple[bool, list[int]]:
        return _JSON.search(file.name) is not None, [int(n) for n in re.findall(r"\d+", str(file))]

    return sorted(filter(is_metrics, files), key=order)


def is_machines(name: str) -> bool:
    """Whether a metric is one of time or of the machine."""
    return MACHINE.search(name) is not None


def equal(x: Any, y: Any) -> bool:
    """Whether two values of a metric are equal; NaN equals NaN."""
    both_nan = isinstance(x, float) and isinstance(y, float) and math.isnan(x) and math.isnan(y)
    return both_nan or x == y


def number(value: Any) -> float | None:
    """A value as a number, where it is one; a CSV has texts."""
    try:
        return None if value is None or isinstance(value, (bool, list, dict)) else float(value)
    except ValueError:
        return None


def read_metrics(path: Path) -> Iterator[tuple[int | None, Row, int]]:
    """The step of each row, None where it names none, the row, and its number from 1. Raises ValueError."""
    for index, row in enumerate(_rows(path), 1):
        row = _flat(row)
        named = next((number(row[name]) for name in STEPS if name in row), None)
        yield (int(named) if named is not None and named.is_integer() else None), row, index


def _flat(row: Row, prefix: str = "") -> Row:
    """A row without nested objects, such as the `data` of verl's file logger: data/actor/lr."""
    flat: Row = {}
    for name, value in row.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _rows(path: Path) -> Iterable[Row]:
    if path.suffix == ".jsonl":
        return (row for _, row in json_rows(path))
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
