"""The first difference of two runs, and what may explain it.

The first difference is the first step whose bits differ, and in this step the first quantity in causal order:

    before the first step:  configuration, data, first weights
    in each step:           prompts, tokens, sampling logprobs, trainer logprobs, rewards, advantages,
                            gradient (of which weight), optimizer state, weights
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .difference import Difference, differences, first_difference
from .ledger import LEDGER, Head, LedgerFile, Line, read_ledger
from .run_environment import LAWFUL


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_runs`. Equal runs have no difference and the same number of steps."""

    difference: Difference | None
    steps: tuple[int, int]
    environment: list[str]  # differences of the environment that may explain it, one line each
    lawful: list[str]  # differences of the environment that decide no bit, by the law
    later: Difference | None = None  # the first in a step, where the runs already start differently

    @property
    def equal(self) -> bool:
        """Whether every step of both runs is equal to the bit."""
        return self.difference is None and self.steps[0] == self.steps[1]

    @property
    def first_step(self) -> int | None:
        """The first step that differs; None where no step does."""
        first = self.later or self.difference
        return first and first.step

    @property
    def lines(self) -> list[str]:
        """What came out, in words: that both are equal, or the first difference, and the first in a step."""
        if self.equal:
            return [f"equal to the bit: {self.steps[0]} steps"]
        if self.difference is None:
            return [f"equal to the bit as far as both go: {self.steps[0]} and {self.steps[1]} steps"]
        if self.difference.step is not None:
            return [str(self.difference)]
        then = f"then {self.later}" if self.later else "every step that both have is equal to the bit"
        return [str(self.difference), then]


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
    at_start, steps = compare_heads(a.head, b.head), (len(a.lines), len(b.lines))
    if not at_start and not in_steps:
        return Comparison(None, steps, [], [])
    environment, lawful = _environments(a, b, in_steps.step if in_steps else len(a.lines))
    return Comparison(at_start or in_steps, steps, environment, lawful, in_steps if at_start else None)


def compare_heads(a: Head, b: Head) -> Difference | None:
    """The first difference in what two runs start from: configuration, data, first weights."""
    return next(_head_differences(a, b), None)


def _head_differences(a: Head, b: Head) -> Iterator[Difference]:
    start = Difference("configuration", place="before the first step")
    settings = differences(a.settings, b.settings, absent=None)
    for setting in sorted(settings, key=lambda d: d.quantity):
        yield replace(start, part=setting.quantity, values=setting.values)
    if a.data != b.data:
        yield replace(start, quantity="data")
    if a.weights != b.weights:
        leaves = b.leaves if a.names == b.names else []
        yield _in_weights(replace(start, quantity="first_weights"), a.names, a.leaves, leaves)


def compare_lines(head: Head, a: Line, b: Line) -> Difference | None:
    """The first quantity of one step that differs, or None. `head` names the weights."""
    if a.keys != b.keys:
        return Difference("random keys", step=a.step)
    if d := first_difference(a.quantities, b.quantities):
        leaves = (line.leaves.get(d.quantity, []) for line in (a, b))
        return _in_weights(Difference(d.quantity, step=a.step), head.names, *leaves)
    if a.updates != b.updates:
        return Difference("updates", (a.updates, b.updates), "so far", step=a.step)
    return None


def _in_weights(d: Difference, names: list[str], a: list[str], b: list[str]) -> Difference:
    """A difference with the weights that differ. a, b: its leaves in the two runs, one for each weight."""
    if not a or len(a) != len(b):
        return d
    first, *others = (name for name, x, y in zip(names, a, b, strict=True) if x != y)
    return replace(d, part=first, others=len(others))


def _environments(a: LedgerFile, b: LedgerFile, step: int) -> tuple[list[str], list[str]]:
    """Differences of the environments that the two runs had up to `step`: (possible explanations, lawful)."""
    explain, lawful = [], []
    values = (_environment_values(run, step) for run in (a, b))
    # A setting that one head has, where the other run left it out, is told as a setting.
    in_a_head = {f"process.{key}" for run in (a, b) for key in run.head.settings}
    for d in sorted(differences(*values, absent={"nothing"}), key=lambda d: d.quantity):
        if d.quantity in in_a_head:
            continue
        line = f"{d.quantity}: {' and '.join(', '.join(sorted(side)) for side in d.values)}"
        (lawful if d.quantity.startswith(LAWFUL) else explain).append(line)
    return explain, lawful


def _environment_values(run: LedgerFile, step: int) -> dict[str, set[str]]:
    """All values of each key of the environment up to `step`: a resumed run may have several environments."""
    values: dict[str, set[str]] = {}
    for first, environment in run.starts:
        if first <= step:
            for key, value in environment.items():
                values.setdefault(key, set()).add(str(value))
    return values
