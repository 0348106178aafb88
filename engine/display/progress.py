"""How far a command is: on a terminal a few lines that stay in place, elsewhere plain lines.

Plain lines come at a rate that a person can read, whether a step takes a millisecond or an hour.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from .terminal import console

# A field such as "reward 0.550"; as a Text it has a style.
Field = str | Text
_BLOCKS = "▁▂▃▄▅▆▇█"
_REFRESHES_PER_S = 4
# Between plain lines: at least 2 s, and 5% of the time so far up to 5 minutes. An hour has about 100 lines.
_LINE_EVERY_S, _LINE_SHARE, _LINE_AT_LEAST_EVERY_S = 2.0, 0.05, 300.0
# The time left follows from this many steps.
_RECENT_STEPS = 20
# A bar shorter than this says less than the numbers beside it. A longer one than the second is empty space.
_BAR, _LONGEST_BAR = 8, 40
# Lines of fields at most, so that the display is never higher than a small window.
_FIELD_LINES = 6


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a row of at most `width` blocks, from the lowest value to the highest.

    A block is the mean of neighbouring values. Fewer than two finite values, or equal ones, have no curve.
    """
    known = np.array(values, np.float64)
    known = known[np.isfinite(known)]
    if len(known) < 2 or width < 2:
        return ""
    means = np.array([part.mean() for part in np.array_split(known, min(width, len(known)))])
    low, high = means.min(), means.max()
    if low == high:
        return ""
    return "".join(_BLOCKS[round(x)] for x in (means - low) / (high - low) * (len(_BLOCKS) - 1))


def duration(seconds: float) -> str:
    """A time as hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"


def packed(fields: Sequence[Field], width: int) -> Iterator[Text]:
    """The fields, two spaces between them, in lines of at most `width` columns. A longer field is cut."""
    line = Text()
    for field in fields:
        text = field.copy() if isinstance(field, Text) else console.text(field)
        text.truncate(width, overflow="ellipsis")
        if line and line.cell_len + 2 + text.cell_len > width:
            yield line
            line = Text()
        line = line + Text("  ") + text if line else text
    if line:
        yield line


class Display:
    """The progress of `total` steps: a bar, the time left, what a step says of itself, and a curve.

    Use it as a context. At its end the terminal is as it was, and the last picture stays.
    """

    def __init__(
        self,
        total: int,
        title: str,
        completed: int = 0,
        curve: tuple[str, Sequence[float]] = ("", ()),
        shows_time_left: bool = True,
        transient: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """completed: the steps that are done already. clock: seconds that never go back.

        curve: a name, and its values of the steps that are done. The terminal shows the values of all steps.
        transient: at the end the last picture goes.
        """
        self._total, self._completed, self._title = total, completed, title
        self._shows_time_left, self._transient, self._clock = shows_time_left, transient, clock
        self._began_s = self._printed_s = clock()
        self._times: deque[tuple[float, int]] = deque([(self._began_s, completed)], _RECENT_STEPS + 1)
        self._groups: tuple[Sequence[Field], ...] = ()
        self._curve, self._values = curve[0], list(curve[1])
        # A result, and the number of steps that were done when it was measured.
        self._result, self._result_of, self._result_printed_s = "", 0, -float("inf")
        self._notice, self._has_printed = "", False
        self._live: Live | None = None

    def step(
        self,
        *groups: Sequence[Field],
        value: float | None = None,
        completed: int | None = None,
        result: str = "",
    ) -> None:
        """Show that a step is completed. groups: fields that say how it went; each group begins a line.

        value: the curve's. completed: of the total, by default one more than before. result: what only some
        steps measure, such as an evaluation. A plain line has it where its own step measured it, and such
        steps have lines of their own. A terminal keeps it, with the number of its step, until the next one.
        """
        self._completed = self._completed + 1 if completed is None else completed
        self._times.append((self._clock(), self._completed))
        self._groups = groups
        if value is not None:
            self._values.append(value)
        if result:
            self._result, self._result_of = result, self._completed
        if self._live is None and self._is_due(bool(result)):
            self._has_printed, self._printed_s = True, self._clock()
            if result:
                self._result_printed_s = self._printed_s
            console.print("\n  ".join(self._plain(result)))

    def announce(self, notice: str) -> None:
        """Show a notice below the display from now on, on a terminal. A signal handler may call this."""
        self._notice = notice

    def __enter__(self) -> "Display":
        if console.is_interactive and not console.quiet:
            self._live = Live(
                get_renderable=self._picture,
                console=console,
                refresh_per_second=_REFRESHES_PER_S,
                transient=self._transient,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._notice = ""
            self._live.stop()

    def _is_due(self, has_result: bool) -> bool:
        """Whether it is time for a plain line. The first and the last step always have one.

        A step with a result waits for no line but the last one that had a result.
        """
        elapsed_s = self._clock() - self._began_s
        wait_s = min(max(_LINE_EVERY_S, _LINE_SHARE * elapsed_s), _LINE_AT_LEAST_EVERY_S)
        printed_s = self._result_printed_s if has_result else self._printed_s
        is_late = self._clock() - printed_s >= wait_s
        return is_late or not self._has_printed or self._completed == self._total

    def _plain(self, result: str) -> Iterator[str]:
        value = [f"{self._curve} {self._values[-1]:.3f}"] if self._values else []
        first, *others = self._groups or ([],)
        time_left = f", {left} left" if (left := self._time_left()) else ""
        count = f"{self._title} {self._completed}/{self._total}{time_left}"
        yield "  ".join([count, *value, *map(str, first), *([result] if result else [])])
        yield from ("  ".join(map(str, group)) for group in others if group)

    def _time_left(self) -> str:
        """The time that the other steps take at the rate of the recent ones; empty where nobody knows."""
        (first_s, first), (last_s, last) = self._times[0], self._times[-1]
        if not self._shows_time_left or last <= first or last >= self._total:
            return ""
        left_s = (last_s - first_s) / (last - first) * (self._total - last)
        return duration(left_s - (self._clock() - last_s))

    def _picture(self) -> RenderableType:
        """The display as the terminal shows it."""
        width = console.width
        lines = [line for group in self._all_groups(width) for line in packed(group, width)]
        if self._notice:
            lines = [*lines[: _FIELD_LINES - 1], *packed([console.text(self._notice, "bold yellow")], width)]
        return Group(self._bar(width), *lines[:_FIELD_LINES])

    def _all_groups(self, width: int) -> list[Sequence[Field]]:
        """The groups, with the curve before them: its first value, the blocks and its last value."""
        values, (first, *others) = self._values, self._groups or ([],)
        if self._result:
            age = "" if self._result_of == self._completed else f" (step {self._result_of})"
            first = [*first, f"{self._result}{age}"]
        if not values:
            return [first, *others]
        blocks = "" if console.options.ascii_only else sparkline(values, min(24, width // 4))
        curve = console.text(f"{self._curve} ", "bold")
        if blocks:
            curve = curve + Text(f"{values[0]:.3f} ") + Text(blocks, "cyan") + Text(" ")
        curve = curve + Text(f"{values[-1]:.3f}", "bold")
        return [[curve, *first], *others]

    def _bar(self, width: int) -> RenderableType:
        title, count = self._title, f"{self._completed}/{self._total}"
        left = self._time_left()
        elapsed_s = duration(self._clock() - self._began_s)
        timing = f"{left} left" if left else elapsed_s
        room = width - len(title) - len(count) - len(timing) - 6
        cells: list[RenderableType] = [console.text(title, "bold")]
        if room >= _BAR:
            size = min(room, _LONGEST_BAR)
            cells.append(ProgressBar(self._total, min(self._completed, self._total), width=size))
        cells += [Text(count), Text(timing, "dim")]
        grid = Table.grid(padding=(0, 2, 0, 0))
        for _ in cells:
            grid.add_column(no_wrap=True)
        grid.add_row(*cells)
        return grid


def silent(stage: str) -> None:
    """Take the place of Stages, where nothing is to be shown."""


class Stages:
    """The progress of a command whose parts cannot be counted: what it does now, and for how long.

    Use it as a context. Elsewhere than on a terminal each stage is a line.
    """

    def __init__(self, title: str):
        self._title, self._stage, self._began_s = title, "starting", time.monotonic()
        self._spinner = Spinner("line" if console.options.ascii_only else "dots")
        self._live: Live | None = None

    def __enter__(self) -> "Stages":
        if console.is_interactive and not console.quiet:
            # Transient: what the command finds out takes the place of what it was doing.
            self._live = Live(get_renderable=self._picture, console=console, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, stage: str) -> None:
        """Say that a stage begins."""
        self._stage = stage
        if self._live is None:
            console.print(f"{self._title}: {stage}")

    def _picture(self) -> RenderableType:
        elapsed = duration(time.monotonic() - self._began_s)
        line = Text(" ") + console.text(self._title, "bold") + Text(f"  {elapsed}  ", "dim")
        stage = console.text(self._stage)
        stage.truncate(max(1, console.width - line.cell_len - 1), overflow="ellipsis")
        grid = Table.grid()
        grid.add_row(self._spinner, line + stage)
        return grid
