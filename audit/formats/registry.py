"""Which framework wrote a file, and how the file is read by what the framework declares."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from ...files.inputs import open_input
from ...files.reading import one_line
from ..frameworks import FRAMEWORKS, LOGS, NAMES
from . import fields, unknown
from .framework import Log, Rows
from .lines import json_rows, parquet_rows
from .pickles import PickledError
from .record import LoggedRollout

# How a Parquet file begins, and a pickle.
_PARQUET, _PICKLE = b"PAR1", b"\x80"
# Completions of a log that are looked at before a model is loaded.
_FIRST_ROWS = 16
LOG_SUFFIXES = (".jsonl", ".parquet", ".pt")
# Of a log that does not grow: all of it counts.
ALL: Mapping[Path, int] = MappingProxyType({})


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
    return sorted(files, key=lambda file: natural_order(file.relative_to(path)))


def natural_order(path: Path) -> list[tuple[int, str]]:
    """A key that sorts numbers in a name by their value: step 2 before step 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def find_format(path: Path, name: str = "auto") -> Log:
    """The kind of log called `name`, or the one that the file's first row is of.

    Raises ValueError for an unknown name, and for a file that is of no known format. Raises PickledError for
    a pickle.
    """
    if name != "auto" and name not in NAMES:
        raise ValueError(f"format {name} is not known; choose auto, {', '.join(NAMES)}")
    magic = _magic(path)
    if magic.startswith(_PICKLE):
        first, *others = scripted()
        raise PickledError(
            f"{path} is a pickle, and zerokl loads none",
            f"`zerokl convert {path} --format {first}` (or {', '.join(others)}) prints what to run in that "
            "framework's environment",
        )
    binary = next((log for log in LOGS.values() if log.magic and magic.startswith(log.magic)), None)
    return binary or _by_first_row(path, name, parquet_rows if magic.startswith(_PARQUET) else json_rows)


def scripted() -> list[str]:
    """The frameworks that have a script for their pickles."""
    return [name for name, framework in FRAMEWORKS.items() if framework.script]


def _by_first_row(path: Path, name: str, rows: Rows) -> Log:
    """The log that the first row of a file is of. Where it is of none, the one called `name` says why."""
    place, row = next(rows(path), ("", None))
    if row is None:
        raise ValueError(f"{path} holds no row")
    asked = LOGS.get(name)
    known = asked if asked and asked.recognises(row) else None
    known = known or next((log for log in LOGS.values() if log.recognises(row)), asked)
    if known is None:
        raise ValueError(f"{path}, {place}: {unknown.refusal(row, NAMES)}")
    ours = known.name == "zerokl" and name in FRAMEWORKS and FRAMEWORKS[name].writes_ours
    if name not in ("auto", known.name) and not ours:
        raise ValueError(f"{path}, {place}: the row is of the format {known.name}; leave out --format {name}")
    return replace(known, rows=rows)


def _magic(path: Path) -> bytes:
    try:
        with open_input(path) as file:
            return file.read(4)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def read_rollouts(
    path: Path, format: str = "auto", ends: Mapping[Path, int] = ALL
) -> Iterator[tuple[str, LoggedRollout]]:
    """The completions of a log, file or folder, with the place of each ("FILE, line 3").

    ends: where it is given, the files of lines that count, and the bytes of each. A completion that an
    earlier file of the folder has counts once: ranks write the same samples, and a framework may write all
    of them and those it trained on. Raises ValueError that names file and line for a line that cannot be
    read.
    """
    files = list(ends) or log_files(path)
    earlier: set[int] = set()
    for file in files:
        chosen = find_format(file, format)
        if file in ends:
            chosen = replace(chosen, rows=partial(json_rows, end=ends[file]))
        here: set[int] = set()
        again = 0
        for where, rollout in _file_rollouts(file, chosen):
            identity = _identity(rollout) if len(files) > 1 else None
            if identity in earlier:
                again += 1
                continue
            if identity is not None:
                here.add(identity)
            yield where, rollout
        earlier |= here
        if again:
            told = f"{file}: {again} completions are those of an earlier file, and count once"
            print(one_line(told), file=sys.stderr, flush=True)


def _file_rollouts(file: Path, chosen: Log) -> Iterator[tuple[str, LoggedRollout]]:
    for place, row in chosen.rows(file):
        where = f"{file}, {place}"
        try:  # fields.named takes longer, and a log has 10^6 lines
            for rollout in chosen.parse(row, file):
                yield where, rollout
        except (KeyError, ValueError) as error:
            raise fields.named_error(where, error) from None


def _identity(rollout: LoggedRollout) -> int | None:
    """The same number for a completion that is written twice; None where the log does not name its sample."""
    if rollout.step is None or rollout.sample is None or rollout.completion_ids is None:
        return None
    names = (rollout.step, rollout.prompt, rollout.sample, rollout.turn, rollout.weight_span)
    columns = (rollout.logprobs, rollout.trainer_logprobs)
    bits = tuple(None if x is None else x.tobytes() for x in columns)
    return hash((*names, rollout.prompt_ids, rollout.completion_ids, bits))


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
