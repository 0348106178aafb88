"""The sample logs, by the log that each file is of, and what a reader makes of them."""

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from zerokl.audit.formats.record import LoggedRollout
from zerokl.audit.formats.registry import find_format, read_rollouts

SAMPLES = Path(__file__).parents[1] / "log_samples"
FILES: dict[str, list[Path]] = {}
for _file in sorted(SAMPLES.glob("*.jsonl")):
    FILES.setdefault(find_format(_file).name, []).append(_file)


def rows_of(log: str) -> list[tuple[dict, Path]]:
    """The rows of a log's samples, each with its file."""
    return [(json.loads(line), file) for file in FILES[log] for line in file.read_text().splitlines()]


def first_row(file: Path) -> dict:
    return json.loads(file.read_text().splitlines()[0])


def read(path: Path, name: str = "auto") -> list[LoggedRollout]:
    return [rollout for _, rollout in read_rollouts(path, name)]


def write_rows(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def told(rollouts: Iterable[LoggedRollout]) -> set[str]:
    """What completions tell: the fields that are there in one of them at least."""
    names = {field.name for field in fields(LoggedRollout)} - {"prompt_ids"}
    return {name for rollout in rollouts for name in names if getattr(rollout, name) is not None}


def declared(names: Iterable[str]) -> set[str]:
    """The fields that a file of audit/frameworks names."""
    return {name for key in names for name in key.split()}


def places(value: object, path: tuple = ()) -> list[tuple]:
    """Every place of a JSON value below its root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, inner in items for p in [(*path, key), *places(inner, (*path, key))]]


def holder(row: dict, path: tuple) -> dict | list:
    """What holds the last key of a path."""
    for key in path[:-1]:
        row = row[key]
    return row
