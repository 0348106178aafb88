"""Files that a command writes at its end for CI: looked at before it begins."""

from pathlib import Path

from ..files.inputs import append_text
from ..files.writing import check_writable


def check_outputs(summary: str, junit: str) -> None:
    """Raise OSError now for a summary or a JUnit file that cannot be written; "" is none."""
    if summary and Path(summary).exists():
        append_text(summary, "")  # a pipe or a device is refused now, and not after the work
    if junit:
        check_writable(Path(junit).parent)
