"""Files that hold pickled objects. Loading one runs the code in it, so zerokl loads none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any


class PickledError(ValueError):
    """A file that its own framework should open. `zerokl convert` prints the script for it."""

    def __init__(self, reason: str, remedy: str) -> None:
        """reason: why zerokl does not open it. remedy: the command that prints the script."""
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """No row: raises PickledError."""
    raise PickledError(
        f"{path} is a pickle, and zerokl loads none",
        f"`zerokl convert {path} --format skyrl` (or verl, slime) prints what to run in that framework's "
        "environment",
    )
    yield
