"""One side of a comparison of logs: the rollouts and the metrics of a run, by step.

Of a rollout only hashes are kept, so that a log of any size fits in memory. `rollouts_of` reads those of one
step again.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..formats.record import LoggedRollout
from ..formats.registry import log_files, read_rollouts
from .metric_rows import Row, equal, is_metrics, metric_files, read_metrics

Placed = tuple[str, LoggedRollout]


class Digest(NamedTuple):
    """A completion. Hashes are of all bits; NaN is one value. None stands for what the log does not have."""

    key: tuple
    prompt_ids: bytes | None
    prompt_text: bytes | None
    completion_ids: bytes | None
    completion_text: bytes | None
    mask: bytes | None
    logprobs: bytes | None
    trainer_logprobs: bytes | None
    values: tuple  # reward, advantage, weight version
    experts: bytes | None
    tokens: int  # that were drawn
    surprise: float | None  # nats: minus the sum of the sampler's logprobs

    @property
    def prompt(self) -> bytes | None:
        """What the prompt is known by, in one log."""
        return self.prompt_ids or self.prompt_text

    @property
    def completion(self) -> bytes | None:
        """What the completion is known by, in one log."""
        return self.completion_ids or self.completion_text


@dataclass
class Step:
    """What a log has of a step."""

    rollouts: list[Digest] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of the rollouts, counted over the whole log

    @property
    def prompts(self) -> list[bytes]:
        """The prompts in an order of their own; none where a rollout has none."""
        return sorted(r.prompt for r in self.rollouts if r.prompt is not None)


@dataclass
class Side:
    """A run, as far as it was logged.

    numbered: the log names its steps. Else each rollout, and each row of metrics, counts as a step.
    """

    path: Path
    numbered: bool
    steps: dict[int, Step] = field(default_factory=dict)  # ascending
    metrics: dict[int, Row] = field(default_factory=dict)  # ascending
    rows: dict[int, int] = field(default_factory=dict)  # of the metrics: the row, from 1
    repeated: set[int] = field(default_factory=set)  # steps that were done again; the last one counts
    files: list[Path] = field(default_factory=list)  # of the rollouts


def split(path: Path) -> tuple[list[Path], Path | None]:
    """The files of rollouts and the file of metrics. A file is one of them, a folder may have both."""
    if path.is_file():
        return ([], path) if is_metrics(path) else ([path], None)
    metrics = metric_files(path)
    try:
        files = [file for file in log_files(path) if file not in metrics]
    except ValueError:
        if not metrics:
            raise
        files = []
    return files, metrics[-1] if metrics else None


def has_steps(path: Path) -> bool:
    """Whether the first rollout of a log, or the first row of its metrics, names its step.

    Raises ValueError where there is none.
    """
    files, metrics = split(path)
    for file in files:
        for _, rollout in read_rollouts(file):
            return rollout.step is not None
    if metrics is None:
        raise ValueError(f"{path} holds no completion")
    return next((step is not None for step, _, _ in read_metrics(metrics)), False)


def read_side(path: Path, numbered: bool) -> Side:
    """A log. numbered: take the steps that it names. Raises ValueError for a line that cannot be read."""
    files, metrics = split(path)
    side = Side(path, numbered, files=files)
    if files:
        _read_steps(side)
    if metrics is not None and (numbered or not files):
        _read_rows(side, metrics)
    side.steps, side.metrics = (dict(sorted(table.items())) for table in (side.steps, side.metrics))
    return side


def without_steps_before(side: Side, step: int, shift: int) -> Side:
    """A side from a step of its rollouts on. shift: what its metrics are ahead by.

    Raises ValueError where nothing is left.
    """
    steps = {s: x for s, x in side.steps.items() if s >= step}
    metrics = {s: x for s, x in side.metrics.items() if s >= step + shift}
    if not side.numbered or not (steps or metrics):
        raise ValueError(f"--resumed_at ({step}) is no step that {side.path} names")
    return replace(side, steps=steps, metrics=metrics)


def rollouts_of(side: Side, step: int) -> list[Placed]:
    """The rollouts of a step, read again, in the order of the log."""
    wanted = side.steps[step].places
    rollouts: list[Placed] = []
    for index, placed in enumerate(_rollouts(side.files)):
        if len(rollouts) < len(wanted) and index == wanted[len(rollouts)]:
            rollouts.append(placed)
            if len(rollouts) == len(wanted):
                break
    return rollouts


def _rollouts(files: list[Path]) -> Iterator[Placed]:
    for file in files:
        yield from read_rollouts(file)


def _read_steps(side: Side) -> None:
    numbers = enumerate(_rollouts(side.files))

    def step_of(placed: tuple[int, Placed]) -> int:
        index, (place, rollout) = placed
        if side.numbered and rollout.step is None:
            raise ValueError(f"{place}: step is missing, which the first line has")
        return rollout.step if side.numbered else index

    for number, group in groupby(numbers, key=step_of):
        places, digests = [], []
        for index, (_, rollout) in group:
            places.append(index)
            digests.append(_digest(rollout))
        before = side.steps.get(number)
        if before is not None and not _done_again(before.rollouts, digests):
            before.places += places
            before.rollouts += digests
            continue
        if before is not None:
            side.repeated.add(number)
        side.steps[number] = Step(digests, places)


def _done_again(before: list[Digest], after: list[Digest]) -> bool:
    """Whether a log has the rollouts of a step twice, and not in two parts."""
    if all(any(part is not None for part in d.key) for d in (*before, *after)):
        return bool({d.key for d in before} & {d.key for d in after})
    return sorted(str(d.prompt) for d in before) == sorted(str(d.prompt) for d in after)


def _read_rows(side: Side, file: Path) -> None:
    newest: int | None = None
    rows = list(read_metrics(file))
    named = side.numbered and any(step is not None for step, _, _ in rows)
    for index, (step, row, number) in enumerate(rows):
        if named and step is None:
            continue  # a header among rows that name their steps
        place = step if named else index
        if place in side.metrics and place == newest:
            side.metrics[place] = side.metrics[place] | row  # of one step: training, then evaluation
            continue
        if place in side.metrics:
            side.repeated.add(place)
        side.metrics[place], side.rows[place] = row, number
        newest = place


def _digest(rollout: LoggedRollout) -> Digest:
    ids = rollout.completion_ids
    drawn = None if ids is None else rollout.drawn()
    experts = rollout.routed_experts
    return Digest(
        key=(rollout.prompt, rollout.sample, rollout.turn),
        prompt_ids=_ids(rollout.prompt_ids),
        prompt_text=_text(rollout.prompt_text),
        completion_ids=_ids(ids),
        completion_text=_text(rollout.completion_text),
        mask=None if drawn is None else _hash(drawn.tobytes()),
        logprobs=_bits(rollout.logprobs),
        trainer_logprobs=_bits(rollout.trainer_logprobs),
        values=(rollout.reward, rollout.advantage, rollout.weight_span),
        experts=None if experts is None else _hash(str(experts.shape).encode() + experts.tobytes()),
        tokens=0 if drawn is None else int(drawn.sum()),
        surprise=_surprise(rollout.logprobs),
    )


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _ids(ids: tuple[int, ...] | None) -> bytes | None:
    return None if ids is None else _hash(np.array(ids, np.int64).tobytes())


def _text(text: str | None) -> bytes | None:
    return None if text is None else _hash(text.encode("utf-8", "surrogatepass"))


def _bits(column: np.ndarray | None) -> bytes | None:
    """A column that is empty of numbers says nothing."""
    if column is None or np.isnan(column).all():
        return None
    return _hash(np.where(np.isnan(column), np.float32(np.nan), column).tobytes())


def _surprise(logprobs: np.ndarray | None) -> float | None:
    if logprobs is None or np.isnan(logprobs).all():
        return None
    return float(-np.nansum(logprobs, dtype=np.float64))


def same(x: Any, y: Any) -> bool:
    """Whether two values are equal; NaN equals NaN, and a value that only one has is no difference."""
    return x is None or y is None or equal(x, y)
