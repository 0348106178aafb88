"""The table of log formats, and how a file is read by its row of the table."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ...files.inputs import open_input
from . import nemo_rl, prime_rl, slime, text_only, tinker, titanrl, zerokl
from .lines import json_rows
from .record import LoggedRollout

Row = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """How one framework's log is read."""

    name: str
    # Which file it is, for people.
    file: str
    # Whether a row is of this format.
    recognises: Callable[[Row], bool]
    # The completions of a row. Raises ValueError for a wrong field, and KeyError for a missing one.
    parse: Callable[[Row, Path], Iterator[LoggedRollout]]
    # The rows of a file, with the place of each.
    rows: Callable[[Path], Iterator[tuple[str, Row]]] = json_rows
    # How else to get a log that can be audited, where this one lacks ids or logprobs.
    remedy: str = ""


_RECORD_TRL = "record the run with zerokl.integrations.trl.record"
_RECORD_VERL = "record the run with zerokl.integrations.verl"


def _pickle(path: Path) -> Iterator[tuple[str, Row]]:
    """zerokl loads no pickle: loading one runs the code in it."""
    raise ValueError(
        f"{path} is a pickle, and zerokl loads none; "
        f"`zerokl convert {path} --format skyrl` (or verl, slime) prints what to run in that "
        "framework's environment"
    )
    yield


# The order decides which format is tried first.
FORMATS = {
    row.name: row
    for row in (
        Format("zerokl", "a log in zerokl's own fields, JSONL", zerokl.recognises, zerokl.parse),
        Format("nemo-rl", "train_data_stepN.jsonl", nemo_rl.recognises, nemo_rl.parse),
        Format("tinker", "capture/sample.jsonl", tinker.recognises, tinker.parse),
        Format(
            "titanrl",
            "rollout_samples.jsonl",
            titanrl.recognises,
            titanrl.parse,
            remedy="set log_logprobs in the recorder's Config",
        ),
        Format("prime-rl", "rollouts/step_N/.../traces.jsonl", prime_rl.recognises, prime_rl.parse),
        Format("slime", "--save-debug-rollout-data, .pt", slime.recognises, slime.parse, slime.rows),
        Format("skyrl", "global_step_N_training_input.pkl", lambda row: False, zerokl.parse, _pickle),
        Format(
            "verl",
            "rollout_data_dir/STEP.jsonl",
            text_only.recognises_verl,
            text_only.parse_verl,
            remedy=_RECORD_VERL,
        ),
        Format(
            "trl",
            "completions/completions_STEP.parquet",
            text_only.recognises_trl,
            text_only.parse_trl,
            text_only.trl_rows,
            remedy=_RECORD_TRL,
        ),
    )
}
# How a binary file begins, and the format that has such files.
_MAGIC = {b"PAR1": "trl", b"PK": "slime", b"\x80": "skyrl"}
# Formats whose log can also be in our own fields, written by a recorder or by `zerokl convert`.
_RECORDED = ("slime", "skyrl", "verl", "trl")
# Completions of a log that are looked at before a model is loaded.
_FIRST_ROWS = 16
LOG_SUFFIXES = (".jsonl", ".parquet", ".pt")


def holds_logs(folder: Path, suffixes: tuple[str, ...] = LOG_SUFFIXES) -> bool:
    """Whether a folder has a file that may be a log, at any depth."""
    return any(file.suffix in suffixes for file in folder.rglob("*"))


def log_files(path: Path) -> list[Path]:
    """The files of a log: the file itself, or the logs below a folder, step 2 before step 10.

    Raises ValueError where there is none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path} is no file and no folder")
    files = [file for file in path.rglob("*") if file.suffix in LOG_SUFFIXES and file.is_file()]
    if not files:
        raise ValueError(f"{path} holds no log ({', '.join(LOG_SUFFIXES)})")
    return sorted(files, key=lambda file: _natural(str(file.relative_to(path))))


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in a name by their value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def find_format(path: Path, name: str = "auto") -> Format:
    """The format called `name`, or the one that the file's first row is of.

    Raises ValueError for an unknown name, and for a file that is of no known format.
    """
    if name != "auto" and name not in FORMATS:
        raise ValueError(f"format {name} is not known; choose auto, {', '.join(FORMATS)}")
    magic = _magic(path)
    for beginning, binary in _MAGIC.items():
        if magic.startswith(beginning):
            return FORMATS[binary]
    if name in _RECORDED or name == "auto":
        return _json_format(path, name)
    return FORMATS[name]


def _json_format(path: Path, name: str) -> Format:
    """The format of a file of JSON lines, by its first row; `name` or our own, unless name is auto."""
    place, row = next(json_rows(path), ("", None))
    if row is None:
        raise ValueError(f"{path} holds no row")
    known = next((f for f in FORMATS.values() if f.recognises(row)), None)
    if known is None or (name != "auto" and known.name not in (name, "zerokl")):
        keys = ", ".join(list(row)[:8]) or "no field"
        wanted = ", ".join(FORMATS) if name == "auto" else name
        raise ValueError(f"{path}, {place}: a row with {keys} is not of a known format ({wanted})")
    return replace(known, rows=json_rows)


def _magic(path: Path) -> bytes:
    try:
        with open_input(path) as file:
            return file.read(4)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def read_rollouts(path: Path, format: str = "auto") -> Iterator[tuple[str, LoggedRollout]]:
    """The completions of a log, file or folder, with the place of each ("FILE, line 3").

    Raises ValueError that names file and line for a line that cannot be read.
    """
    for file in log_files(path):
        chosen = find_format(file, format)
        for place, row in chosen.rows(file):
            where = f"{file}, {place}"
            try:
                for rollout in chosen.parse(row, file):
                    yield where, rollout
            except KeyError as missing:
                raise ValueError(f"{where}: {missing.args[0]} is missing") from None
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None


def check_first_rows(path: Path, format: str = "auto") -> None:
    """Check that a log can be read and audited, as far as its first rows tell, before a model is loaded.

    Raises ValueError (see read_rollouts), also for rows without token ids or logprobs.
    """
    try:
        remedy = find_format(log_files(path)[0], format).remedy
        for place, rollout in islice(read_rollouts(path, format), _FIRST_ROWS):
            try:
                rollout.check_scored(remedy)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
    except ValueError as error:
        raise ValueError(f"audit: {error}") from None
