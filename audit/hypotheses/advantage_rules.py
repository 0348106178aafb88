"""The rules by which trainers make advantages of rewards, and how near those of a log are to each."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .completions import CLOSE, Completion

# What trainers add to a standard deviation.
_EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)


@dataclass(frozen=True)
class Parts:
    """Parts of completions with an advantage other than 0, [N]. The values of completions are [M]."""

    completions: list[Completion]
    owner: np.ndarray  # [N] the completion
    turn: np.ndarray  # [N] from 0
    advantage: np.ndarray  # [N]
    reward: np.ndarray  # [M]
    group: np.ndarray  # [M] numbers of the groups
    step: np.ndarray  # [M] numbers of the steps


def parts_of(completions: Sequence[Completion]) -> Parts:
    """The parts that can be judged: of groups of the usual size, where the log has a reward."""
    known = [x for x in completions if x.reward is not None and np.isfinite(x.reward)]
    sizes = Counter(x.group for x in known)
    # A group of another size is cut off, or two groups of one prompt: it has not the mean of its rule.
    count = Counter(sizes[x.group] for x in known)
    known = [x for x in known if sizes[x.group] == max(count, key=count.__getitem__)]
    rows = [
        (i, turn, a)
        for i, x in enumerate(known)
        if x.numbers and any(x.advantages)
        for turn, a in enumerate(x.advantages)
        if a
    ]
    owner, turn, advantage = map(np.array, zip(*rows, strict=True)) if rows else (np.zeros(0, int),) * 3
    reward = np.array([x.reward for x in known], np.float64)
    group, step = (_numbered([getattr(x, name) for x in known]) for name in ("group", "step"))
    return Parts(known, owner, turn, advantage, reward, group, step)


def _numbered(keys: Sequence[Hashable]) -> np.ndarray:
    """A number for each key, the same for equal ones, from 0 on."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], int)


def known_rules(parts: Parts) -> Iterator[tuple[str, np.ndarray]]:
    """What each rule says to the completions: its name, and their advantages, [M]."""
    r, group, step = parts.reward, parts.group, parts.step
    beside_group, beside_step = r - _mean(r, group), r - _mean(r, step)
    size = np.bincount(group)[group]
    yield "reward less the group's mean", beside_group
    for ddof, what in ((1, "n - 1"), (0, "n")):
        for epsilon in _EPSILONS:
            deviation = _deviation(beside_group, group, ddof) + epsilon
            yield (
                f"reward less the group's mean, over its standard deviation ({what}, epsilon {epsilon:g})",
                _over(beside_group, deviation),
            )
    yield "reward less the mean of the group's others (leave-one-out)", beside_group * _over(size, size - 1)
    for ddof in (1, 0):
        for epsilon in (_EPSILONS[0], _EPSILONS[-2]):
            yield (
                "reward less the batch's mean, over its standard deviation",
                _over(beside_step, _deviation(beside_step, step, ddof) + epsilon),
            )
            yield (
                "reward less the group's mean, over the batch's standard deviation",
                _over(beside_group, _deviation(beside_step, step, ddof) + epsilon),
            )
            yield (
                "reward less the group's mean, over the standard deviation of these in the batch",
                _over(beside_group, _deviation(beside_group, step, ddof) + epsilon),
            )
    yield "reward less the batch's mean", beside_step
    yield "reward", r


def _mean(x: np.ndarray, key: np.ndarray) -> np.ndarray:
    """For each of x [M] the mean of those with its key."""
    return (np.bincount(key, x) / np.bincount(key))[key]


def _deviation(centred: np.ndarray, key: np.ndarray, ddof: int) -> np.ndarray:
    """For each of x [M], less its mean, the standard deviation of those with its key; 0 for one alone."""
    degrees = np.maximum(np.bincount(key) - ddof, 1)
    centred = centred - _mean(centred, key)
    return np.sqrt(np.bincount(key, centred * centred) / degrees)[key]


def _over(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x / y, and 0 where y is 0."""
    return np.divide(x, y, out=np.zeros(len(x)), where=y != 0)


def baseline(parts: Parts) -> tuple[str, np.ndarray, np.ndarray]:
    """The rule of one baseline for each step, the middle of reward - advantage: see signal_checks.py."""
    gap, steps = parts.reward[parts.owner] - parts.advantage, parts.step[parts.owner]
    middle = {step: float(np.median(gap[steps == step])) for step in set(steps.tolist())}
    expected = parts.reward - np.array([middle.get(step, np.nan) for step in parts.step.tolist()])
    return "reward less one baseline for the step", expected, close(parts, expected)


def close(parts: Parts, expected: np.ndarray) -> np.ndarray:
    """Which advantages are what a rule expects, [N] bool."""
    largest = np.zeros(int(parts.group.max()) + 1)
    np.maximum.at(largest, parts.group, np.nan_to_num(np.abs(expected)))
    allowed = CLOSE * largest[parts.group[parts.owner]]
    return np.abs(parts.advantage - expected[parts.owner]) <= allowed


def distance(parts: Parts, expected: np.ndarray, follows: np.ndarray) -> float:
    """How far the advantages that follow a rule are from it: 7 digits of the largest, which fp32 keeps."""
    gaps = np.abs(parts.advantage - expected[parts.owner])[follows]
    return round(float(gaps.max(initial=0.0) / np.abs(parts.advantage[follows]).max(initial=1e-30)), 7)
