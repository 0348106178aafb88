"""`zerokl audit --follow LOG`: an audit beside a running trainer, up to the first line beyond a tolerance.

A writer is amid its last line, so only lines that end with a newline are read. At the end the rest counts if
it is whole, as of a writer that ends no line. A file that was cut, replaced or written anew ends the audit:
lines that were judged are no longer there to be shown. The tolerance of each sequence (max_abs, a band) is
asked of each line as it comes; a mean over the log (max_k3, a project's figure) with each page. A log may be
a folder that gets a file for each step.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import numpy as np

from ..engine.display.progress import silent
from ..files.inputs import input_lines, open_input
from ..files.reading import parse_json
from .columns import audit_columns, both_columns
from .conclusion.outcome import Tolerances
from .config import AuditSettings
from .figures.bands import BANDS, band_figures
from .figures.measure import measure
from .formats import fields
from .formats.framework import Log
from .formats.lines import json_row, json_rows
from .formats.record import LoggedRollout
from .formats.registry import find_format, log_files
from .hypotheses.value_checks import LogValues
from .report import Report

# Seconds between two looks at the log, and the share of the time that pages may take.
_LOOK_S, _PAGES = 0.5, 0.1
# Bytes before the end of what was read, by which a file that was written anew is told.
_TAIL_BYTES = 4096
# Lines that are judged at once.
_TOGETHER = 256

Columns = tuple[np.ndarray, np.ndarray]  # trainer and sampler, [n] fp32 of the tokens that have both


@dataclass
class _File:
    """A file of lines, as far as it was read."""

    path: Path
    log: Log
    inode: int
    end: int = 0  # bytes of the lines that were read
    lines: int = 0
    tail: bytes = b""  # the bytes before `end`

    def grown(self, last: bool = False) -> Iterator[tuple[str, LoggedRollout]]:
        """The completions of the lines that were added, with their places.

        last: nobody writes any more, so a line without a newline counts if it is JSON. Raises ValueError for
        a file that holds no longer what was read.
        """
        try:
            with open_input(self.path) as file:
                self._check(file)
                for line in input_lines(file, self.path):
                    if not line.endswith(b"\n") and not (last and _is_json(line)):
                        return
                    self.end, self.lines = self.end + len(line), self.lines + 1
                    self.tail = line[-_TAIL_BYTES:]
                    for place, row in json_row(self.path, self.lines, line):
                        where = f"{self.path}, {place}"
                        with fields.named(where):
                            yield from ((where, x) for x in self.log.parse(row, self.path))
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read ({error.strerror})") from None

    def _check(self, file: BinaryIO) -> None:
        """Go to the end of what was read. Raises ValueError where it is no longer there."""
        status = os.fstat(file.fileno())
        what = ""
        if status.st_ino != self.inode:
            what = "is another file now"
        elif status.st_size < self.end:
            what = f"has {status.st_size:,} bytes, after it had {self.end:,}"
        else:
            file.seek(self.end - len(self.tail))
            if file.read(len(self.tail)) != self.tail:
                what = "was written anew"
        if what:
            raise ValueError(
                f"{self.path} {what}: the {self.lines:,} lines that were read are no longer there; "
                "start again, with another --out"
            )


class Follow:
    """Follows a log, see the module. settings: with a tolerance, and without a model."""

    def __init__(self, path: Path, n: int | None, settings: AuditSettings):
        self._path, self._n, self._settings = path, n or 0, settings
        self._files: dict[Path, _File] = {}
        self._values = LogValues()
        tolerances = settings.tolerances
        band = tolerances.band if tolerances.band in BANDS else None
        self._of_a_line = Tolerances(max_abs=tolerances.max_abs, band=band)

    def run(
        self, idle_s: float, write: Callable[[Report], None], stage: Callable[[str], None] = silent
    ) -> tuple[Report, str]:
        """The last report, and the place of the line beyond the tolerance; "" where none is.

        Ends at such a line, at a report that does not pass, after idle_s seconds without a new line (0: does
        not), and at Ctrl-C or SIGTERM. write: is given each report. stage: is called with how far it is.
        Raises ValueError for a log that cannot be read, and for one that holds no line at the end.
        """
        report, lines, reported, grew, next_page = None, 0, 0, time.monotonic(), 0.0
        with _signals() as signals:
            while True:
                is_last = signals.seen or 0 < idle_s <= time.monotonic() - grew
                place = self._first_beyond(is_last)
                ended = is_last or bool(place)
                if self.lines > lines:
                    lines, grew = self.lines, time.monotonic()
                notes = self._amid_a_line() if is_last and not place else []
                if lines and (ended or time.monotonic() >= next_page) and (lines > reported or notes):
                    start = time.monotonic()
                    report, reported = self._report(notes), lines
                    write(report)
                    next_page = time.monotonic() + (time.monotonic() - start) / _PAGES
                    stage(f"{self._path}: {lines:,} lines; {report.outcome.words}")
                if ended or (report and not report.outcome.passed):
                    break
                time.sleep(_LOOK_S)
        if report is None:
            raise ValueError(f"audit: {self._path} holds no whole line; nothing was followed")
        return report, place

    @property
    def lines(self) -> int:
        """The lines that were read."""
        return sum(file.lines for file in self._files.values())

    def _first_beyond(self, last: bool) -> str:
        """Read what was added, up to the first line beyond its tolerance: its place, or ""."""
        try:
            self._find_files()
            for file in self._files.values():
                if place := self._in_file(file, last):
                    return place
        except ValueError as error:
            raise ValueError(f"audit: {error}") from None
        return ""

    def _in_file(self, file: _File, last: bool) -> str:
        batch: list[tuple[str, Columns, tuple[int, int, bytes]]] = []
        for place, rollout in file.grown(last):
            if columns := self._columns(place, rollout, file.log.remedy):
                batch.append((place, columns, (file.end, file.lines, file.tail)))
            if len(batch) == _TOGETHER:
                if beyond := self._beyond(batch, file):
                    return beyond
                batch = []
        return self._beyond(batch, file)

    def _beyond(self, batch: Sequence[tuple[str, Columns, tuple[int, int, bytes]]], file: _File) -> str:
        """The place of the first line beyond the tolerance; the file is then read up to it. Or ""."""
        if not batch or self._hold([columns for _, columns, _ in batch]):
            return ""
        place, _, read = next(x for x in batch if not self._hold([x[1]]))
        file.end, file.lines, file.tail = read
        return place

    def _hold(self, columns: Sequence[Columns]) -> bool:
        trainer, sampler = zip(*columns, strict=True)
        return self._of_a_line.hold(measure(trainer, sampler), band_figures(trainer, sampler))

    def _columns(self, place: str, rollout: LoggedRollout, remedy: str) -> Columns | None:
        settings = self._settings
        if rollout.logprobs is None:
            with fields.named(place):
                rollout.check_scored(remedy)
        rollout = rollout.drawn_with(settings.given_params)
        drawn = rollout.of_version(settings.weight_version)
        if not drawn.any() or rollout.trainer_logprobs is None:
            return None
        rollout = self._values.taken(place, rollout, drawn)
        both = both_columns(rollout, drawn)
        return (rollout.trainer_logprobs[both], rollout.logprobs[both]) if both.any() else None

    def _find_files(self) -> None:
        """Take up files that have a whole line by now."""
        if not self._path.exists():
            if self._files:
                raise ValueError(f"{self._path} is gone, after {self.lines:,} of its lines were read")
            return
        is_new = self._path.is_dir() or not self._files
        for path in log_files(self._path) if is_new and _has_files(self._path) else ():
            if path in self._files or not _has_line(path):
                continue
            log = find_format(path, self._settings.format)
            if log.rows is not json_rows:
                raise ValueError(f"{path} is no file of JSON lines, and --follow reads such as they grow")
            self._files[path] = _File(path, log, path.stat().st_ino)

    def _amid_a_line(self) -> list[str]:
        """A note of each file that ends amid a line."""
        left = {file.path: file.path.stat().st_size - file.end for file in self._files.values()}
        return [f"{path} ends amid a line ({n:,} bytes), which is left out." for path, n in left.items() if n]

    def _report(self, notes: list[str]) -> Report:
        settings = self._settings
        ends = {file.path: file.end for file in self._files.values() if file.end}
        report = audit_columns(
            self._path,
            settings.format,
            self._n,
            settings.weight_version,
            settings.given_params,
            settings.tolerances,
            ends,
        )
        return replace(report, log_notes=[*report.log_notes, *notes])


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line, non_finite=True)
    except ValueError:
        return False
    return True


def _has_files(path: Path) -> bool:
    return path.is_file() or any(x.is_file() for x in path.rglob("*.jsonl"))


def _has_line(path: Path) -> bool:
    """Whether the first line of a file is whole."""
    with open_input(path) as file:
        return next(input_lines(file, path), b"").endswith(b"\n")


@contextmanager
def _signals() -> Iterator[SimpleNamespace]:
    """Inside, the first Ctrl-C or SIGTERM sets `seen`, and the second one raises KeyboardInterrupt.

    A script's `&` starts a command that Ctrl-C does not reach; `kill` does.
    """
    signals = SimpleNamespace(seen=False)

    def handle(_number: int, _frame: object) -> None:
        if signals.seen:
            raise KeyboardInterrupt
        signals.seen = True

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
