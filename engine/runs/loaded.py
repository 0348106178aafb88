"""A run as its folder holds it, finished or still going: `zerokl.load_run`. Nothing here writes."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files.inputs import input_lines, open_input, read_bytes
from ...files.reading import parse_json, shown
from ...files.writing import whole_lines
from ...verify.ledger import LEDGER, LedgerFile, read_ledger
from ...verify.run_files import CONFIG
from ..config.config_file import load_config
from ..config.run_config import Config
from .folder import METRICS, ROLLOUTS
from .held_out import BASE_REWARD, MEAN_REWARD, held_out_curve
from .rollout_lines import parse_rollout

# What a step notes beside its metrics, and the largest of these: sums of them stay numbers.
_NOTES, _LARGEST = ("gradient/layers", "lora/layers", "scaling/overflow"), 1e300
SUMMARY = "summary.json"


@dataclass(frozen=True)
class LoadedRun:
    """The files of a run.

    metrics: name -> a value for each step that is done, NaN where the step has none (text metrics: None). The
    lists have equal lengths, so `pandas.DataFrame(run.metrics)` works. summary: None while the run goes on.
    """

    path: Path
    config: Config
    metrics: dict[str, list[Any]]
    summary: dict[str, Any] | None

    @property
    def steps(self) -> int:
        """The number of steps that are done."""
        return len(self.metrics["step"])

    @property
    def held_out(self) -> list[tuple[int, float]]:
        """(steps done, held-out reward) of every evaluation. 0 steps: the model that the run began with."""
        names = [name for name in ("step", BASE_REWARD, MEAN_REWARD) if name in self.metrics]
        columns = [self.metrics[name] for name in names]
        return held_out_curve(dict(zip(names, line, strict=True)) for line in zip(*columns, strict=True))

    @property
    def ledger(self) -> LedgerFile:
        """The ledger: `.head`, `.lines` and `.damage`. It is read, and its chain checked, at each access.

        Raises OSError when the run has no ledger, ValueError for one of another version.
        """
        return read_ledger(self.path / LEDGER)

    def rollouts(self, steps: Collection[int] | None = None) -> Iterator[dict[str, Any]]:
        """The lines of rollouts.jsonl, one for each completion, in the order of the steps.

        steps: only these; None is all. A last line that is still being written is left out. Raises ValueError
        for a line that is not JSON.
        """
        file = self.path / ROLLOUTS
        if not file.exists():
            return
        with open_input(file) as lines:
            for number, line in enumerate(input_lines(lines, file), 1):
                if not line.endswith(b"\n"):
                    return
                rollout = _parsed(line, file, number, parse_rollout)
                if steps is None or rollout["step"] in steps:
                    yield rollout


def load_run(path: str | Path) -> LoadedRun:
    """Read a run from its folder. It may still be going.

    Raises ValueError for a folder without a run, and for a file of it that cannot be read.
    """
    path = Path(path)
    if not (path / CONFIG).is_file():
        raise ValueError(f"run: {path} holds no run ({CONFIG} is missing)")
    return LoadedRun(
        path, load_config(str(path / CONFIG), None, {}), read_metrics(path / METRICS), _summary(path)
    )


def read_metrics(file: Path) -> dict[str, list[Any]]:
    """The columns of metrics.jsonl, `step` first. A last line that is still being written is left out.

    Raises ValueError for a line that a run does not write.
    """
    content = read_bytes(file) if file.exists() else b""
    lines = enumerate(whole_lines(content)[0], 1)
    rows = [_parsed(line, file, number, parse_metrics) for number, line in lines]
    names = {"step": None} | {name: None for row in rows for name in row}
    return {name: _column([row.get(name) for row in rows]) for name in names}


def parse_metrics(line: bytes | str) -> dict[str, Any]:
    """A line of metrics.jsonl. Raises ValueError for one that a run does not write."""
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    if type(row.get("step")) is not int or row["step"] < 0:
        raise ValueError(f"has step ({shown(row.get('step'))}), which must be a whole number from 0 on")
    for name, value in row.items():
        if name not in _NOTES and value is not None and not _is_figure(value):
            raise ValueError(
                f"has {name} ({shown(value)}), which must be null or a number of at most {_LARGEST:g}"
            )
    return row


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= _LARGEST


def _column(values: list[Any]) -> list[Any]:
    """The values of a metric, NaN for JSON's null; text stays as it is."""
    if any(isinstance(value, str) for value in values):
        return values
    return [math.nan if value is None else value for value in values]


def _parsed(
    line: bytes, file: Path, number: int, parse: Callable[[bytes], dict[str, Any]] = parse_json
) -> dict[str, Any]:
    try:
        return parse(line)
    except ValueError as error:
        raise ValueError(f"run: {file} line {number} {error}") from None


def _summary(path: Path) -> dict[str, Any] | None:
    file = path / SUMMARY
    if not file.exists():
        return None
    return _parsed(read_bytes(file), file, 1)
