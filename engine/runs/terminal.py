"""What the commands print: the console, the progress display, and the table of checks."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ...verify.invariance import Check

console = Console(highlight=False, markup=False, soft_wrap=True)


class Display:
    """Shows progress: on a terminal as a live bar, elsewhere as one line every few steps."""

    def __init__(self, total: int, title: str):
        self._total, self._completed, self._title = total, 0, title
        self._live: Live | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self._progress = Progress(*columns, console=console)
            self._task = self._progress.add_task(title, total=total, text="")
            self._live = Live(self._progress, console=console, refresh_per_second=4)
            self._live.start()

    def step(self, text: str, completed: int | None = None) -> None:
        """Show that a step is completed; `text` says how it went.

        completed: of `total`, by default one more than before.
        """
        self._completed = self._completed + 1 if completed is None else completed
        if self._live is not None:
            self._progress.update(self._task, completed=self._completed, text=text)
        elif self._completed % max(1, self._total // 20) == 0 or self._completed in (1, self._total):
            console.print(f"{self._title} {self._completed}/{self._total}  {text}")
            sys.stdout.flush()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()


def check_table(checks: Sequence[Check]) -> Table:
    """The table of `zerokl verify`."""
    table = Table("check", "dtype", "comparisons", "unequal")
    for c in checks:
        table.add_row(
            c.name, c.dtype, f"{c.comparisons:,}", f"{c.unequal:,}", style=None if c.holds else "bold red"
        )
    return table
