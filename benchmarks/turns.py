"""Processes that take turns: each does one piece of work when it is told to and says how long it took, while
the others wait.

The speed of a shared machine changes within seconds, by half and more (benchmarks/LOG.md, "Turns"); pieces
that follow each other meet the same phase of it far more often than runs of many pieces do.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

# Begins the lines that answer; everything else a side prints is its own.
_MARK = "turn "


def wait() -> None:
    """In a side: wait for the turn. Ends the process when whoever asks has gone."""
    if not sys.stdin.readline():
        raise SystemExit("nobody asks for another turn")


def answer(**seconds: float | str) -> None:
    """In a side: say what the turn took."""
    print(_MARK + json.dumps(seconds), flush=True)


class Side:
    """A process that waits and answers. What it prints to stderr goes to `log`."""

    def __init__(self, words: list[str], log: Path):
        self._log, self._err = log, log.open("w")
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._err, text=True
        )

    def turn(self) -> dict:
        """One turn. Raises RuntimeError when the process ends instead."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line[len(_MARK) :])
        raise RuntimeError(
            f"{self._process.args} ended with {self._process.wait()}:\n{self._log.read_text()[-4000:]}"
        )

    def close(self) -> None:
        """Wait for the process, whose turns are all done. Raises RuntimeError when it fails in the end."""
        self._process.stdin.close()
        self._process.stdout.read()
        code = self._process.wait()
        self._err.close()
        if code:
            raise RuntimeError(f"{self._process.args} ended with {code}:\n{self._log.read_text()[-4000:]}")


def alternate(sides: dict[str, Side], turns: int, warmup: int) -> list[dict[str, dict]]:
    """What every side says of each turn, the first `warmup` dropped; then all are closed.

    Raises RuntimeError when one fails.
    """
    told = [{name: side.turn() for name, side in sides.items()} for _ in range(turns)]
    for side in sides.values():
        side.close()
    return told[warmup:]


def spread(values: list[float]) -> dict[str, float]:
    """The median, and where 80% of the values lie."""
    values, tenth = sorted(values), len(values) // 10
    return {"median": statistics.median(values), "p10": values[tenth], "p90": values[-1 - tenth]}
