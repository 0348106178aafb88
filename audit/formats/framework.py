"""What the file of a framework declares. audit/frameworks/ has one file for each framework.

Readers, `--format`, `--band`, refusals, the docs' tables and the tests all read the declaration.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..figures.gates import Gate
from .lines import json_rows
from .record import LoggedRollout

Row = dict[str, Any]
Rows = Callable[[Path], Iterator[tuple[str, Row]]]
BOTH = "both columns"
SAMPLER = "the sampler's column"


def having(*forms: str) -> Callable[[Row], bool]:
    """What recognises a row that has all fields of one of the forms, their names parted by spaces."""
    names = [frozenset(form.split()) for form in forms]
    return lambda row: any(form <= row.keys() for form in names)


@dataclass(frozen=True)
class Log:
    """A kind of file that a framework writes, and how it is read."""

    # In `--format`.
    name: str
    # Which file it is.
    file: str
    # What makes a run write it.
    switch: str
    # Whether a row is of this log.
    recognises: Callable[[Row], bool]
    # The completions of a row. Raises ValueError for a wrong field, and KeyError for a missing one.
    parse: Callable[[Row, Path], Iterator[LoggedRollout]]
    # What it tells of a completion: fields of LoggedRollout, parted by spaces, and where they stand.
    fields: Mapping[str, str]
    # Fields that a file of metrics has not, or has as numbers.
    marks: tuple[str, ...]
    # Its columns in a few words; "" is a log of texts.
    columns: str = BOTH
    # The rows of a file, with the place of each.
    rows: Rows = json_rows
    # How a binary file begins; b"" is a file of lines.
    magic: bytes = b""
    # How else to get a log that can be audited, where this one lacks ids or logprobs.
    remedy: str = ""


@dataclass(frozen=True)
class Recording:
    """A recorder that writes zerokl's own log inside a framework's run.

    It lies in integrations/, in the file of the framework's name: its path is in people's training scripts,
    it may load torch, and an audit must not.
    """

    # module:name below zerokl.integrations.
    recorder: str
    # What somebody does to record a run.
    switch: str
    # What the log tells of a completion: see Log.
    fields: Mapping[str, str]


@dataclass(frozen=True)
class Framework:
    """A framework whose rollouts zerokl reads or records. Texts are Markdown: pages show them."""

    # In `--format` and `--band`.
    name: str
    # As its makers write it.
    title: str
    # Where the form of its data is known from: version and source file.
    source: str
    # Its page in docs/frameworks, with an anchor where a page has several; "" is a section of index.md.
    page: str = ""
    logs: tuple[Log, ...] = ()
    recording: Recording | None = None
    # A program for the framework's own environment, which writes a file as a log that zerokl reads.
    script: str = ""
    # The number that the project gates on.
    gate: Gate | None = None

    @property
    def writes_ours(self) -> bool:
        """Whether a log of it may be in zerokl's own fields, from a recorder or a script."""
        return bool(self.recording or self.script)
