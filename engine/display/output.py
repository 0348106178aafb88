"""A console whose reader may go away, as `head` does in `zerokl train ... | head -1`."""

import os
import sys
from typing import NoReturn

from rich.console import Console

# 128 + SIGPIPE: what a shell shows of a program that this signal has ended.
OUTPUT_CLOSED = 141


class PipedConsole(Console):
    """rich's console, which ends the process with OUTPUT_CLOSED where nobody reads its output any more."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise SystemExit. What is printed from now on goes nowhere."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(OUTPUT_CLOSED)
