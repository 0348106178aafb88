"""The first difference of two runs, and what may explain it.

The first difference is the first step whose bits differ, and in this step the first quantity in causal order:

    before the first step:  configuration, data, first weights
    in each step:           prompts, tokens, sampling logprobs, trainer logprobs, rewards, advantages,
                            gradient (of which weight), optimizer state, weights
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .environment import LAWFUL
from .ledger import LEDGER, Head, LedgerFile, Line, read_ledger


@dataclass(frozen=True)
class Divergence:
    """The first difference of two runs."""

    step: int | None  # None before the first step
    quantity: str
    part: str = ""  # a weight or a setting, where one can be named
    values: tuple[Any, Any] | None = None  # of a setting, in the two runs
    others: int = 0  # further weights that differ in the same quantity

    def __str__(self) -> str:
        place = "before the first step" if self.step is None else f"step {self.step}"
        text = f"{place}: {self.quantity.replace('_', ' ')}"
        if self.values is not None:
            text += f" {self.part}: {self.values[0]!r} and {self.values[1]!r}"
        elif self.part:
            text += f" of {self.part}"
        return text + (f" and {self.others} other weights" if self.others else "")


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_runs`. Equal runs have no divergence and the same number of steps."""

    divergence: Divergence | None
    steps: tuple[int, int]
    environment: list[str]  # differences of the environment that may explain the divergence, one line each
    lawful: list[str]  # differences of the environment that decide no bit, by the law
    later: Divergence | None = (
        None  # the first difference in a step, where the runs already start differently
    )

    @property
    def equal(self) -> bool:
        """Whether every step of both runs is equal to the bit."""
        return self.divergence is None and self.steps[0] == self.steps[1]


def run_ledger(path: Path) -> Path:
    """The ledger file of a run folder; a file is returned itself. Raises ValueError when there is none."""
    file = path / LEDGER if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"ledger: {path} holds no {LEDGER}")
    return file


def open_run(path: Path) -> LedgerFile:
    """Read the ledger of a run folder. Raises ValueError when there is none, or when it is damaged."""
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
    """The first difference in what two runs start from: configuration, data, first weights."""
    for key in sorted(a.settings.keys() | b.settings.keys()):
        if (x := a.settings.get(key)) != (y := b.settings.get(key)):
            return Divergence(None, "configuration", key, (x, y))
    if a.data != b.data:
        return Divergence(None, "data")
    if a.weights != b.weights:
        return _weights(None, "first_weights", a.names, a.leaves, b.leaves if a.names == b.names else None)
    return None


def compare_lines(head: Head, a: Line, b: Line) -> Divergence | None:
    """The first quantity of one step that differs, or None. `head` names the weights."""
    if a.keys != b.keys:
        return Divergence(a.step, "random keys")
    for name in [*a.quantities, *(n for n in b.quantities if n not in a.quantities)]:
        if a.quantities.get(name) != b.quantities.get(name):
            return _weights(a.step, name, head.names, a.leaves.get(name), b.leaves.get(name))
    return None if a.updates == b.updates else Divergence(a.step, "updates", "so far", (a.updates, b.updates))


def _weights(
    step: int | None, quantity: str, names: list[str], a: list[str] | None, b: list[str] | None
) -> Divergence:
    """The divergence of a quantity. a, b: its leaves in the two runs, one for each weight, where known."""
    if not a or not b or len(a) != len(b):
        return Divergence(step, quantity)
    unequal = [name for name, x, y in zip(names, a, b, strict=True) if x != y]
    return Divergence(step, quantity, unequal[0], None, len(unequal) - 1)


def _environments(a: LedgerFile, b: LedgerFile, step: int) -> tuple[list[str], list[str]]:
    """Differences of the environments that the two runs had up to `step`: (possible explanations, lawful)."""
    explain, lawful = [], []
    environment_a, environment_b = _environment_values(a, step), _environment_values(b, step)
    for key in sorted(environment_a.keys() | environment_b.keys()):
        x, y = environment_a.get(key, {"nothing"}), environment_b.get(key, {"nothing"})
        if x != y:
            line = f"{key}: {', '.join(sorted(x))} and {', '.join(sorted(y))}"
            (lawful if key.startswith(LAWFUL) else explain).append(line)
    return explain, lawful


def _environment_values(run: LedgerFile, step: int) -> dict[str, set[str]]:
    """All values of each key of the environment up to `step`: a resumed run may have several environments."""
    assert run.head is not None
    resumed = [entry["environment"] for entry in run.resumed if entry["step"] <= step]
    values: dict[str, set[str]] = {}
    for environment in [run.head.environment, *resumed]:
        for key, value in environment.items():
            values.setdefault(key, set()).add(str(value))
    return values
