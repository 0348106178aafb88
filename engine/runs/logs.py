"""The logs of a run, as far as they are intact: metrics.jsonl and rollouts.jsonl."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files.inputs import open_input, read_bytes
from ...files.reading import parse_json
from ...files.writing import whole_lines


@dataclass(frozen=True)
class Log:
    """A JSONL file of a run, as far as it is intact. Its first `ends`[i] bytes hold i steps.

    first: the first step that it holds. It is above 0 only in a rollouts.jsonl that was lost and begun again.
    """

    path: Path
    lines_per_step: int
    first: int
    ends: Sequence[int]
    damage: str | None

    @property
    def stop(self) -> int:
        """The step after the last one that it holds."""
        return self.first + len(self.ends) - 1

    @property
    def lost(self) -> bool:
        """Whether the file is missing, or holds no whole step without being damaged."""
        return len(self.ends) == 1 and self.damage is None

    def end(self, step: int) -> int:
        """The bytes that hold the steps before `step`; 0 where the file holds none of them."""
        return 0 if self.lost else self.ends[max(0, step - self.first)]

    def hash_at(self, step: int) -> str:
        """SHA-256 of the part of the file that holds the steps before `step`."""
        return hashlib.sha256(read_bytes(self.path)[: self.end(step)]).hexdigest()

    def lines(self, step: int) -> list[bytes]:
        """The lines of one step. Raises ValueError where the file does not hold it whole."""
        if not self.first <= step < self.stop:
            raise ValueError(f"{self.path} does not hold step {step} whole")
        with open_input(self.path) as file:
            file.seek(self.end(step))
            return whole_lines(file.read(self.end(step + 1) - self.end(step)))[0]

    def steps(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Each step that the file holds, with its lines."""
        if self.lost:
            return
        n = self.lines_per_step
        lines, _ = whole_lines(read_bytes(self.path)[: self.ends[-1]])
        for start in range(0, len(lines), n):
            yield (
                self.first + start // n,
                [parse_json(line, non_finite=True) for line in lines[start : start + n]],
            )


def read_log(path: Path, lines_per_step: int, may_begin_later: bool = False) -> Log:
    """Read a log, and check of every line that it is JSON and of the step that belongs there.

    may_begin_later: the log may begin at another step than 0.
    """
    first, ends, damage, end = 0, [0], None, 0
    lines, _ = whole_lines(read_bytes(path) if path.exists() else b"")
    for number, raw in enumerate(lines, 1):
        step = _step(raw)
        if number == 1 and may_begin_later and step is not None:
            first = step
        if step != first + (number - 1) // lines_per_step:
            damage = f"{path} line {number} is damaged"
            break
        end += len(raw)
        if number % lines_per_step == 0:
            ends.append(end)
    return Log(path, lines_per_step, first, ends, damage)


def _step(raw: bytes) -> int | None:
    """The step of a line; None where the line is damaged."""
    try:
        line = parse_json(raw, non_finite=True)
    except ValueError:
        return None
    step = line.get("step") if isinstance(line, dict) else None
    return step if type(step) is int and step >= 0 else None
