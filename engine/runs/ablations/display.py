"""What `zerokl ablate` shows while its cells run: on a terminal the grid, elsewhere a line for each cell.

The grid has a row for each combination and a sign for each seed. Where it has more rows than the terminal,
the signs of all cells follow one another. No line is wider than the terminal.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Group
from rich.live import Live
from rich.text import Text

from ....files.reading import one_line
from ...display.progress import duration
from ...display.terminal import console
from .cells import CellRun, State

# A sign for each state, its form where the terminal has ASCII only, and its colour.
SIGNS = {
    State.LEFT: ("·", ".", "dim"),
    State.RUNNING: ("▶", ">", "bold cyan"),
    State.DONE: ("●", "o", "green"),
    State.STOPPED: ("◆", "!", "yellow"),
    State.FAILED: ("✗", "x", "bold red"),
}
# Without a terminal: seconds without a line after which one says how the running cells get on.
_QUIET_S = 60.0
# Running cells that are shown with their steps.
_MOST_RUNNING = 8


class GridDisplay:
    """Shows the cells `runs` while they run (ablation_cells.Watcher)."""

    def __init__(self, runs: Sequence[CellRun]):
        self._runs = runs
        self._live: Live | None = None
        self._began_s = self._last_line_s = time.monotonic()

    def begin(self, jobs: int) -> None:
        """Say what is kept and what is left to run, and show the grid on a terminal."""
        states = Counter(run.state for run in self._runs)
        left, self._began_s = states[State.LEFT], time.monotonic()
        kept = len(self._runs) - left
        begun = sum(1 for run in self._runs if run.state is State.LEFT and run.steps)
        self._say(
            f"{_cells(len(self._runs))}: {f'{kept} kept, ' if kept else ''}{left} to run, {jobs} at a time"
            + (f"; {begun} of them, interrupted before, go on" if begun else "")
        )
        if console.is_terminal and left:
            self._live = Live(console=console, refresh_per_second=2, get_renderable=self._grid)
            self._live.start()

    def look(self) -> None:
        """Without a terminal, say now and then how the running cells get on."""
        if self._live is None and time.monotonic() - self._last_line_s > _QUIET_S:
            running = [run for run in self._runs if run.state is State.RUNNING]
            steps = ", ".join(f"{run.name} {run.steps}/{run.cell.config.steps}" for run in running[:4])
            self._say(f"{self.counts()}  running: {steps}{', ...' if len(running) > 4 else ''}")

    def ended(self, run: CellRun) -> None:
        """Say how a cell ended. On a terminal the grid says it, but not the reason of a failure."""
        result = self.result(run)
        if self._live is None:
            self._say(f"{self.counts()}  {run.name} {result}")
        elif run.reason:
            self._say(f"{run.name} {result}")

    def interrupted(self) -> None:
        """Say what Ctrl-C does."""
        self._say("interrupted: the running cells end; Ctrl-C again ends them at once")
        self._say("the same command goes on where this one stops")

    def close(self) -> None:
        """Leave the terminal as it was, with the grid's last state."""
        if self._live is not None:
            self._live.stop()

    def counts(self) -> str:
        """How many cells are done, running, left and failed, and the time that is left."""
        states = Counter(run.state for run in self._runs)
        done = states[State.DONE] + states[State.STOPPED]
        parts = [f"{done}/{len(self._runs)} done"]
        parts += [f"{n} {s.value}" for s in (State.RUNNING, State.LEFT, State.FAILED) if (n := states[s])]
        left = seconds_left(self._runs, time.monotonic() - self._began_s)
        if left is not None:
            parts.append(f"about {duration(left)} to go")
        return ", ".join(parts)

    @staticmethod
    def result(run: CellRun) -> str:
        """How a cell ended, in words."""
        if run.state is State.DONE and run.reward is not None:
            return f"done: reward {_number(run.first_reward)} to {run.reward:.3f}, {duration(run.seconds)}"
        if run.state is State.LEFT:
            return f"interrupted after {run.steps} steps"
        if run.state is State.STOPPED:
            return f"ended by itself after {run.steps} steps: {run.reason}"
        return f"{run.state.value}{run.reason and f': {run.reason}'}"

    def _say(self, line: str) -> None:
        self._last_line_s = time.monotonic()
        console.print(line)

    def _grid(self) -> Group:
        return Group(
            *grid_lines(self._runs, self.counts(), console.width, console.height, console.options.ascii_only)
        )


def grid_lines(runs: Sequence[CellRun], head: str, width: int, height: int, ascii_only: bool) -> list[Text]:
    """The lines of the grid, none wider than `width`, at most `height` - 1 of them."""
    running = [run for run in runs if run.state is State.RUNNING]
    shown = running[: max(1, min(_MOST_RUNNING, height - 4))]
    rows = _rows(runs)
    space = height - 3 - len(shown)
    if len(rows) <= space:
        body = [_row(name, row, width, ascii_only) for name, row in rows.items()]
    else:
        body = _strip(runs, width, max(1, space), ascii_only)
    lines = [Text(shortened(head, width, ascii_only), style="bold"), *body]
    lines += [_running_line(run, width, ascii_only) for run in shown]
    if len(running) > len(shown):
        lines.append(Text(shortened(f"and {len(running) - len(shown)} more", width, ascii_only)))
    return lines


def _rows(runs: Sequence[CellRun]) -> dict[str, list[CellRun]]:
    """The cells of each combination."""
    rows: dict[str, list[CellRun]] = {}
    for run in runs:
        rows.setdefault(one_line(run.cell.name), []).append(run)
    return rows


def _row(name: str, row: Sequence[CellRun], width: int, ascii_only: bool) -> Text:
    """A combination: its name, a sign for each seed, and the mean of the seeds' newest rewards."""
    rewards = [run.reward for run in row if run.reward is not None]
    mean = f"  {math.fsum(rewards) / len(rewards):6.3f}" if rewards else " " * 8
    signs = _signs(row, ascii_only)
    name_width = max(8, width - len(signs) - len(mean) - 2)
    line = Text(shortened(name, name_width, ascii_only).ljust(min(name_width, 60)) + "  ")
    line.append_text(signs)
    line.append(mean)
    line.truncate(width)
    return line


def _strip(runs: Sequence[CellRun], width: int, lines: int, ascii_only: bool) -> list[Text]:
    """The signs of all cells, one after another, as many as fit.

    Where they do not all fit, the first lines are left out that hold only cells that have ended.
    """
    chunks = [runs[i : i + width] for i in range(0, len(runs), width)]
    first = next((i for i, chunk in enumerate(chunks) if any(_is_open(run) for run in chunk)), len(chunks))
    begin = max(0, min(first, len(chunks) - lines))
    return [_signs(chunk, ascii_only, "") for chunk in chunks[begin : begin + lines]]


def _is_open(run: CellRun) -> bool:
    return run.state in (State.LEFT, State.RUNNING)


def _signs(runs: Sequence[CellRun], ascii_only: bool, gap: str = " ") -> Text:
    parts = [(SIGNS[run.state][1 if ascii_only else 0], SIGNS[run.state][2]) for run in runs]
    return Text(gap).join(Text(sign, style=style) for sign, style in parts)


def _running_line(run: CellRun, width: int, ascii_only: bool) -> Text:
    reward = f"  reward {run.reward:.3f}" if run.reward is not None else ""
    progress = f"  {run.steps}/{run.cell.config.steps} steps{reward}"
    line = _signs([run], ascii_only)
    line.append(" " + shortened(run.name, max(8, width - 2 - len(progress)), ascii_only) + progress)
    line.truncate(width)
    return line


def shortened(text: str, width: int, ascii_only: bool = False) -> str:
    """The text within `width` characters: what is too much is left out of its middle, as names differ there
    least at their ends.
    """
    dots = "..." if ascii_only else "…"
    if len(text) <= width:
        return text
    if width <= len(dots) + 2:
        return text[:width]
    end = (width - len(dots)) // 2
    return text[: width - len(dots) - end] + dots + text[len(text) - end :]


def seconds_left(runs: Sequence[CellRun], elapsed_s: float) -> float | None:
    """The time that the steps of the open cells take at the rate so far; None before the first step.

    elapsed_s: since the first cell was started.
    """
    left = sum(max(0, run.cell.config.steps - run.steps) for run in runs if _is_open(run))
    taken = sum(max(0, run.steps - run.kept) for run in runs)
    return elapsed_s * left / taken if taken and left else None


def _cells(n: int) -> str:
    return f"{n} cell{'' if n == 1 else 's'}"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}"
