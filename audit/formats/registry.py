"""The table of log formats, and how a file is read by its row of the table."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ...files.inputs import open_input
from ...files.reading import one_line
from . import (
    atropos,
    nemo_gym,
    nemo_rl,
    pickles,
    prime_rl,
    prime_rl_tokens,
    slime,
    text_only,
    tinker,
    titanrl,
    unknown,
    zerokl,
)
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
        Format("nemo-gym", "rollouts.jsonl", nemo_gym.recognises, nemo_gym.parse),
        Format("prime-rl", "rollouts/step_N/.../traces.jsonl", prime_rl.recognises, prime_rl.parse),
        Format(
            "prime-rl-tokens",
            "token_exports/step_N/rank_N.jsonl",
            prime_rl_tokens.recognises,
            prime_rl_tokens.parse,
        ),
        Format(
            "atropos",
            "the file of data_path_to_save_groups",
            atropos.recognises,
            atropos.parse,
            remedy="let the environment keep inference_logprobs, as a ManagedServer gives them",
        ),
        Format("slime", "--save-debug-rollout-data, .pt", slime.recognises, slime.parse, slime.rows),
        Format("skyrl", "global_step_N_training_input.pkl", lambda row: False, zerokl.parse, pickles.rows),
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
            remedy=_RECORD_TRL,
        ),
    )
}
# How a binary file begins, and the format that has such files.
_MAGIC = {b"PK": "slime", b"\x80": "skyrl"}
_PARQUET = b"PAR1"
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
    if magic.startswith(_PARQUET):
        return _by_first_row(path, name, text_only.parquet_rows)
    for beginning, binary in _MAGIC.items():
        if magic.startswith(beginning):
            return FORMATS[binary]
    return _by_first_row(path, name, json_rows)


def _by_first_row(path: Path, name: str, rows: Callable[[Path], Iterator[tuple[str, Row]]]) -> Format:
    """The format that the first row of a file is of. Where it is of none, the one called `name` says why."""
    place, row = next(rows(path), ("", None))
    if row is None:
        raise ValueError(f"{path} holds no row")
    asked = FORMATS.get(name)
    known = asked if asked and asked.recognises(row) else None
    known = known or next((f for f in FORMATS.values() if f.recognises(row)), asked)
    if known is None:
        raise ValueError(f"{path}, {place}: {unknown.refusal(row, FORMATS)}")
    if name not in ("auto", known.name) and not (known.name == "zerokl" and name in _RECORDED):
        raise ValueError(f"{path}, {place}: the row is of the format {known.name}; leave out --format {name}")
    return replace(known, rows=rows)


def _magic(path: Path) -> bytes:
    try:
        with open_input(path) as file:
            return file.read(4)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def read_rollouts(path: Path, format: str = "auto") -> Iterator[tuple[str, LoggedRollout]]:
    """The completions of a log, file or folder, with the place of each ("FILE, line 3").

    A completion that an earlier file of the folder has counts once: ranks write the same samples, and a
    framework may write all of them and those it trained on. Raises ValueError that names file and line for a
    line that cannot be read.
    """
    files = log_files(path)
    earlier: set[int] = set()
    for file in files:
        chosen = find_format(file, format)
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


def _file_rollouts(file: Path, chosen: Format) -> Iterator[tuple[str, LoggedRollout]]:
    for place, row in chosen.rows(file):
        where = f"{file}, {place}"
        try:
            for rollout in chosen.parse(row, file):
                yield where, rollout
        except KeyError as missing:
            raise ValueError(f"{where}: {missing.args[0]} is missing") from None
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


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
