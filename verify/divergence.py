"""Where two runs part: the first step, and in it the first quantity in causal order, whose bits differ; and
what may explain it.

configuration, data, first weights;  in each step: prompts, tokens, sampler logprobs, trainer logprobs, rewards, advantages,
gradient (of which weight), optimizer state, weights
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .environment import LAWFUL
from .ledger import LEDGER, Head, LedgerFile, Line, read_ledger


@dataclass(frozen=True)
class Divergence:
    """The first difference.

    `step` is None for what a run starts from; `part` is a weight or a setting, where one can be named.
    """

    step: int | None
    quantity: str
    part: str = ""
    values: tuple[Any, Any] | None = None  # of a setting
    others: int = 0  # further weights that differ in the same quantity

    def __str__(self) -> str:
        place = "before the first step" if self.step is None else f"step {self.step}"
        what = self.quantity.replace("_", " ")
        if self.part:
            what += (
                f" of {self.part}"
                if self.values is None
                else f" {self.part}: {self.values[0]!r} and {self.values[1]!r}"
            )
        return f"{place}: {what}" + (f" and {self.others} other weights" if self.others else "")


@dataclass(frozen=True)
class Comparison:
    """What `compare_runs` found. Equal runs have no divergence and the same number of steps."""

    divergence: Divergence | None
    steps: tuple[int, int]
    environment: list[str]  # differences that may explain it, one line each
    lawful: list[str]  # differences that the law says decide no bit
    later: Divergence | None = None  # where runs that start from different things first differ in a step

    @property
    def equal(self) -> bool:
        """Every step of both, to the bit."""
        return self.divergence is None and self.steps[0] == self.steps[1]


def run_ledger(path: Path) -> Path:
    """The ledger of a run folder, or the file itself. Raises ValueError when there is none."""
    file = path / LEDGER if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"ledger: {path} holds no {LEDGER}")
    return file


def open_run(path: Path) -> LedgerFile:
    """The ledger of a run folder, read. Raises ValueError when there is none or it is damaged."""
    return read_ledger(run_ledger(path)).whole()


def compare_runs(a: LedgerFile, b: LedgerFile) -> Comparison:
    """Compare two ledgers from their beginning."""
    assert a.head is not None
    assert b.head is not None
    pairs = zip(a.lines, b.lines, strict=False)
    in_steps = next((d for x, y in pairs if (d := compare_lines(a.head, x, y))), None)
    at_start = compare_heads(a.head, b.head)
    environment, lawful = _environments(a, b, in_steps.step if in_steps else len(a.lines))
    later = in_steps if at_start else None
    return Comparison(at_start or in_steps, (len(a.lines), len(b.lines)), environment, lawful, later)


def compare_heads(a: Head, b: Head) -> Divergence | None:
    """What two runs start from: configuration, data, first weights."""
    for key in sorted(a.settings.keys() | b.settings.keys()):
        if (x := a.settings.get(key)) != (y := b.settings.get(key)):
            return Divergence(None, "configuration", key, (x, y))
    if a.data != b.data:
        return Divergence(None, "data")
    if a.weights != b.weights:
        return _weights(None, "first_weights", a.names, a.leaves, b.leaves if a.names == b.names else None)
    return None


def compare_lines(head: Head, a: Line, b: Line) -> Divergence | None:
    """The first quantity of one step that differs, None if none does. `head` names the weights."""
    if a.keys != b.keys:
        return Divergence(a.step, "random keys")
    for name in [*a.quantities, *(n for n in b.quantities if n not in a.quantities)]:
        if a.quantities.get(name) != b.quantities.get(name):
            return _weights(a.step, name, head.names, a.leaves.get(name), b.leaves.get(name))
    return None


def _weights(
    step: int | None, quantity: str, names: list[str], a: list[str] | None, b: list[str] | None
) -> Divergence:
    if not a or not b or len(a) != len(b):
        return Divergence(step, quantity)
    differ = [name for name, x, y in zip(names, a, b, strict=True) if x != y]
    return Divergence(step, quantity, differ[0], None, len(differ) - 1)


def _environments(a: LedgerFile, b: LedgerFile, before: int) -> tuple[list[str], list[str]]:
    """Differences between any environment that one run had up to a step and the other's:

    (that may explain, lawful).
    """
    explain, lawful = [], []
    x, y = _values(a, before), _values(b, before)
    for key in sorted(x.keys() | y.keys()):
        mine, theirs = x.get(key, {"nothing"}), y.get(key, {"nothing"})
        if mine != theirs:
            line = f"{key}: {', '.join(sorted(mine))} and {', '.join(sorted(theirs))}"
            (lawful if key.startswith(LAWFUL) else explain).append(line)
    return explain, lawful


def _values(run: LedgerFile, before: int) -> dict[str, set[str]]:
    """Every value that each key of the environment had up to a step: a run may go on elsewhere."""
    assert run.head is not None
    values: dict[str, set[str]] = {}
    for environment in [
        run.head.environment,
        *(r["environment"] for r in run.resumed if r["step"] <= before),
    ]:
        for key, value in environment.items():
            values.setdefault(key, set()).add(str(value))
    return values
