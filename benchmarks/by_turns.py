"""Processes that take turns: each does one piece of work when it is told to, while the others wait.

A process answers with the time that its work took. The speed of a shared machine changes within seconds, by
half and more (benchmarks/LOG.md, "Turns"). Pieces that follow each other meet the same phase of it far more
often than runs of many pieces do.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

# The beginning of each line that answers. The process that asks drops all other lines of a side.
_MARK = "turn "


def parser(doc: str, result: str) -> argparse.ArgumentParser:
    """The options of whoever asks. result: the file that is written, in benchmarks/results/cpu."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--turns", type=int, default=33, help="turns of each side")
    options.add_argument("--warmup", type=int, default=3, help="turns at the beginning that are dropped")
    out = Path(__file__).parent / "results" / "cpu" / result
    options.add_argument("--out", type=Path, default=out)
    return options


def write(result: dict, out: Path) -> None:
    """Write the figures of a benchmark to its file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def wait() -> None:
    """In a side: wait for the turn. Ends the process when the process that asks has ended."""
    if not sys.stdin.readline():
        raise SystemExit("nobody asks for another turn")


def answer(**seconds: float | str) -> None:
    """In a side: answer with the figures of the turn."""
    print(_MARK + json.dumps(seconds), flush=True)


class Side:
    """A process that waits and answers. Its stderr goes to the file `log`."""

    def __init__(self, command: list[str], log: Path):
        self._log, self._stderr = log, log.open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True
        )

    def turn(self) -> dict:
        """The answer of one turn. Raises RuntimeError when the process ends instead."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line[len(_MARK) :])
        raise RuntimeError(
            f"{self._process.args} ended with {self._process.wait()}:\n{self._log.read_text()[-4000:]}"
        )

    def close(self) -> None:
        """Wait for the end of the process, after its last turn. Raises RuntimeError when it fails."""
        self._process.stdin.close()
        self._process.stdout.read()
        code = self._process.wait()
        self._stderr.close()
        if code:
            raise RuntimeError(f"{self._process.args} ended with {code}:\n{self._log.read_text()[-4000:]}")


def alternate(sides: dict[str, Side], turns: int, warmup: int) -> list[dict[str, dict]]:
    """The answers of every side, turn by turn, without the first `warmup` turns.

    All sides are closed at the end. Raises RuntimeError when a side fails.
    """
    answers = [{name: side.turn() for name, side in sides.items()} for _ in range(turns)]
    for side in sides.values():
        side.close()
    return answers[warmup:]


def spread(values: list[float]) -> dict[str, float]:
    """The median, and where 80% of the values lie."""
    values, tenth = sorted(values), len(values) // 10
    return {"median": statistics.median(values), "p10": values[tenth], "p90": values[-1 - tenth]}


def words(spread: dict[str, float]) -> str:
    """A spread in words."""
    return f"{spread['median']:.2f} ({spread['p10']:.2f} to {spread['p90']:.2f})"
