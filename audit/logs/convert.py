"""`zerokl convert`: a log of another framework as one of zerokl; for a pickle, the script that does it."""

import json
from pathlib import Path

from ...engine.display.terminal import console
from ...files.inputs import read_text
from ..formats.registry import find_format, log_files, read_rollouts
from ..formats.zerokl import as_row

_SCRIPTS = Path(__file__).parents[1] / "formats" / "scripts"


def convert(source: Path, out: Path | None, format: str) -> int:
    """Write `out`, or print a script for a pickle. Returns 0. Raises ValueError for bad input."""
    try:
        if pickled := _script(source, format):
            console.print(pickled, end="")
            return 0
        if out is None:
            raise ValueError("OUT is missing; name the file to write")
        if out.exists():
            raise ValueError(f"{out} exists; choose another file")
        count = _write(source, out, format)
    except ValueError as error:
        raise ValueError(f"convert: {error}") from None
    console.print(f"{out}: {count} completions")
    return 0


def _script(source: Path, format: str) -> str:
    """The script for a pickle; empty for a log that zerokl reads. Raises ValueError for an unknown pickle."""
    if not source.is_file():
        return ""
    known = find_format(source, format)
    if known.name == "slime":
        try:
            next(known.rows(source), None)
        except ValueError:
            return read_text(_SCRIPTS / "slime_to_log.py")
    if known.name != "skyrl":
        return ""
    if format == "auto":
        raise ValueError(f"{source} is a pickle; say who wrote it with --format skyrl, verl or slime")
    if not (script := _SCRIPTS / f"{format}_to_log.py").exists():
        raise ValueError(f"{source} is a pickle, and {format} writes none that zerokl knows of")
    return read_text(script)


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
