"""The rows of a log, one at a time: a file of lines of any size takes the memory of one line."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ...files.inputs import check_input, input_lines, open_input
from ...files.reading import one_line, parse_json

# A smaller file is read before anybody wonders.
_LARGE_BYTES = 64 * 2**20
_REPORT_EVERY_S = 5.0
_BOM = b"\xef\xbb\xbf"


def json_rows(path: Path, end: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, one a line, with their places. Empty lines are passed over.

    end: the bytes that are read, whole lines; None reads all. Raises ValueError that names file and line for
    a line that is none, and for a file that cannot be read.
    """
    try:
        with open_input(path) as file:
            read = 0
            for number, line in enumerate(_shown(path, file), 1):
                read += len(line)
                if end is not None and read > end:
                    return
                yield from json_row(path, number, line)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def json_row(path: Path, number: int, line: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """The object of a line with its place; nothing for an empty one. number: of the line, from 1."""
    if number == 1:
        line = line.removeprefix(_BOM)
    if line.strip():
        yield f"line {number}", _object(path, number, line)


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line, non_finite=True)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number}: is no JSON object")
    return row


def _shown(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file. Of a large one, standard error says now and then how much is read."""
    size = path.stat().st_size
    if size < _LARGE_BYTES:
        yield from input_lines(file, path)
        return
    read, last = 0, time.monotonic()
    for line in input_lines(file, path):
        yield line
        read += len(line)
        if time.monotonic() - last > _REPORT_EVERY_S:
            last = time.monotonic()
            progress = f"{path}: read {read / 2**20:,.0f} of {size / 2**20:,.0f} MiB"
            print(one_line(progress), file=sys.stderr, flush=True)


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet file, with their places. Raises ValueError without pyarrow."""
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(f"{path} is a Parquet file; pip install pyarrow to read it") from None
    try:
        check_input(path)
        file = ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    number = 0
    for batch in file.iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", row
