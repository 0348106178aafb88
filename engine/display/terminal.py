"""What the commands print: the console, and the table of checks. progress.py shows how far they are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ...files.reading import printable
from .output import PipedConsole

if TYPE_CHECKING:
    from ...verify.invariance import Check


class Printer(PipedConsole):
    """A console for texts that anybody may have written.

    Names of tensors, paths, completions and errors pass through here. A terminal obeys control characters, so
    every string is printed with escapes in their place, in tables too. A rich.Text is printed as it is:
    `text` makes one.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def say(self, text: str) -> None:
        """Print prose: a terminal gets its lines broken between words, a file gets them whole.

        Not for commands and paths. Those are copied, so `print` leaves them to the terminal as one line.
        """
        self.print(text, soft_wrap=not self.is_terminal)

    def text(self, text: str, style: str = "") -> Text:
        """A styled text without control characters."""
        return Text(printable(text), style)


console = Printer(highlight=False, markup=False, emoji=False, soft_wrap=True)


def check_table(checks: "Sequence[Check]") -> Table:
    """The table of `zerokl verify`."""
    table = Table("check", "dtype", "comparisons", "unequal")
    for c in checks:
        table.add_row(
            c.name, c.dtype, f"{c.comparisons:,}", f"{c.unequal:,}", style=None if c.holds else "bold red"
        )
    return table
