"""`zerokl diff` of two logs of any framework: their first difference, and what it tells of a resume."""

from collections.abc import Iterator
from pathlib import Path

from ...engine.display.terminal import console
from ...verify.run_files import LEDGER
from ..formats.registry import LOG_SUFFIXES, holds_logs
from .first_difference import common_steps, first_difference
from .metric_rows import STEPS, is_machines
from .resume_causes import Logs, conclude, shift_of
from .seeds import conclude_seeds
from .shown_state import shown
from .side import Side, has_steps, read_side, without_steps_before

# Of logs, and of metrics.
_SUFFIXES = (*LOG_SUFFIXES, ".json", ".csv")


def is_log(path: Path) -> bool:
    """Whether a path looks like a log or like metrics, and not like a run or a trace."""
    if path.is_file():
        return path.suffix in _SUFFIXES and path.name != LEDGER
    return path.is_dir() and not (path / LEDGER).exists() and holds_logs(path, _SUFFIXES)


def are_logs(a: Path, b: Path) -> bool:
    """Whether both are logs; False where neither is. Raises ValueError where only one is."""
    if is_log(a) != is_log(b):
        raise ValueError(f"diff: {a} and {b} must both be logs, both be runs or both be traces")
    return is_log(a)


def diff_logs(a: Path, b: Path, resumed_at: int | None = None) -> bool:
    """Print the first difference of A and B, and what follows from it.

    resumed_at: B's first step after a resume, where its log has the steps before as well. Returns whether
    there is none and no fault is seen. Raises ValueError for bad input.
    """
    try:
        numbered = all(has_steps(path) for path in (a, b))
        side_a, side_b = read_side(a, numbered), read_side(b, numbered)
        shift = shift_of(side_a, side_b)
        if resumed_at is not None:
            side_b = without_steps_before(side_b, resumed_at, shift)
        _check_comparable(side_a, side_b, shift)
    except ValueError as error:
        raise ValueError(f"diff: {error}") from None
    logs = Logs.of(side_a, side_b, shift)
    for note in _notes(logs):
        console.say(note)
    first = first_difference(logs.a, logs.b, logs.shift)
    if first is not None:
        console.print(f"first difference {first.words}")
        lines = list(conclude(logs, first))
    else:
        console.print(f"equal: {_compared(logs)}")
        lines = list(shown(logs)) if _is_certificate(logs) else []
    seeds = list(conclude_seeds(logs.a, logs.b, first is None))
    for line in lines + seeds:
        console.say(line)
    return not (first or seeds)


def _check_comparable(a: Side, b: Side, shift: int) -> None:
    """Raise ValueError where the two have nothing in common that can be compared."""
    if not common_steps(a, b, shift):
        if a.steps and b.steps and a.numbered:
            raise ValueError(
                f"{a.path} has steps {min(a.steps)} to {max(a.steps)}, and {b.path} steps {min(b.steps)} to "
                f"{max(b.steps)}; they have none in common"
            )
        kinds = ["rollouts" if side.steps else "metrics" for side in (a, b)]
        raise ValueError(
            f"{a.path} holds {kinds[0]} and {b.path} {kinds[1]}, of no common step; give both sides the same"
        )
    if not (a.steps and b.steps) and _shared_metrics(a, b) <= set(STEPS):
        raise ValueError(f"{a.path} and {b.path} have no metric in common but the step")


def _shared_metrics(a: Side, b: Side) -> set[str]:
    steps = a.metrics.keys() & b.metrics.keys()
    shared = {n for s in steps for n in a.metrics[s] if n in b.metrics[s]}
    return {name for name in shared if not is_machines(name)}


def _is_certificate(logs: Logs) -> bool:
    """Whether more was asked than whether two files are equal."""
    joined = all(side.steps and side.metrics for side in (logs.a, logs.b))
    return logs.b.numbered and (joined or logs.resumed)


def _notes(logs: Logs) -> Iterator[str]:
    """What is not compared, and which of two tries counts."""
    for name, side in (("A", logs.a), ("B", logs.b)):
        if side.repeated:
            yield (
                f"{name} did steps {min(side.repeated)} to {max(side.repeated)} again; the last time counts"
            )
    for what, a, b in (("rollouts", logs.a.steps, logs.b.steps), ("metrics", logs.a.metrics, logs.b.metrics)):
        if a and b and logs.a.numbered and min(a) != min(b):
            earlier, step = ("A", min(b)) if min(a) < min(b) else ("B", min(a))
            yield f"{what} before step {step} are taken of {earlier} only, and are not compared"
            if earlier == "B":
                yield "B is taken as the resumed run, and A begins later: name the run without a break first"
        elif bool(a) != bool(b):
            yield f"{what} are in {'A' if a else 'B'} only, and are not compared"


def _compared(logs: Logs) -> str:
    parts = []
    if logs.a.steps and logs.b.steps:
        steps = [s for s in logs.b.steps if s in logs.a.steps]
        parts.append(f"{sum(len(logs.b.steps[s].rollouts) for s in steps)} completions")
    if logs.a.metrics and logs.b.metrics:
        rows = len(logs.a.metrics.keys() & logs.b.metrics.keys())
        parts.append(f"{len(_shared_metrics(logs.a, logs.b))} metrics of {rows} rows")
    return " and ".join(parts)
