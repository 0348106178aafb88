"""`zerokl convert`: a log of another framework as one of zerokl; for a pickle, the script that writes it."""

import json
from pathlib import Path

from ...engine.display.terminal import console
from ..formats.pickles import PickledError
from ..formats.registry import find_format, log_files, read_rollouts, scripted
from ..frameworks import FRAMEWORKS
from ..frameworks.zerokl import as_row


def convert(source: Path, out: Path | None, format: str) -> int:
    """Write `out`, and return 0. Of a pickle, print the script that writes it.

    Raises ValueError where no log was written: for bad input, and for a pickle.
    """
    try:
        if out is not None and out.exists():
            raise ValueError(f"{out} exists; choose another file")
        if pickled := _pickled(source, format):
            script, reason = pickled
            console.print(script, end="")
            raise ValueError(
                f"no log was written: {reason}; save the script that was printed, and run it where the "
                "framework is installed, as its first lines say"
            )
        if out is None:
            raise ValueError("OUT is missing; name the file to write")
        count = _write(source, out, format)
    except ValueError as error:
        raise ValueError(f"convert: {error}") from None
    console.print(f"{out}: {count} completions")
    return 0


def _pickled(source: Path, format: str) -> tuple[str, str] | None:
    """For a file that zerokl does not open: the script that does, and why. None for what zerokl reads.

    Raises ValueError where nobody says who wrote a pickle.
    """
    if not source.is_file():
        return None
    try:
        next(find_format(source, format).rows(source), None)
        return None
    except PickledError as error:
        writer = error.writer or format
        if writer == "auto":
            *first, last = scripted()
            raise ValueError(
                f"{source} is a pickle; say who wrote it with --format {', '.join(first)} or {last}"
            ) from None
        if writer not in scripted():
            raise ValueError(f"{source} is a pickle, and {writer} writes none that zerokl knows of") from None
        return FRAMEWORKS[writer].script, error.reason


def _write(source: Path, out: Path, format: str) -> int:
    """Write the rollouts under another name first: a log that cannot be read leaves no half of a file."""
    partial = out.with_name(f"{out.name}.partial")
    try:
        count = 0
        with open(partial, "x", encoding="utf-8") as file:
            for place, rollout in read_rollouts(source, format):
                try:
                    file.write(json.dumps(as_row(rollout), allow_nan=False) + "\n")
                except ValueError as error:
                    remedy = find_format(log_files(source)[0], format).remedy
                    raise ValueError(f"{place}: {error}{'; ' + remedy if remedy else ''}") from None
                count += 1
        if not count:
            raise ValueError(f"{source} holds no completion")
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return count
