"""A task: problems with known answers, and a reward for the text of a completion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...kernels.philox import Stream, uniform_range
from .problem import Problem


@runtime_checkable
class Task(Protocol):
    """The members of every task. A task of the user's needs no base class.

    Two more are optional. `binary` is True where every reward is 0 or 1: the mean reward is then an accuracy.
    `check(problem)` raises ValueError for an answer that the reward cannot read; a run begins with it.
    """

    chat: bool  # whether prompts go through the tokenizer's chat template, if it has one

    def problems(self, split: str) -> Sequence[Problem]:
        """All problems of a split, "train" or "held_out". Every call returns the same problems."""
        ...

    def reward(self, problem: Problem, completion: str) -> float:
        """A finite number. 1.0 means solved, 0.0 not solved. It may be `async`."""
        ...


class SplitTask:
    """What tasks of ours share: problems that lie in `_splits`, without a chat template, and 0 or 1."""

    chat = False
    binary = True
    _splits: Mapping[str, list[Problem]]

    def problems(self, split: str) -> list[Problem]:
        return self._splits[split]


@dataclass(frozen=True)
class RewardSettings:
    """Which reward a run has, and how it is computed. TaskConfig says what each of them is."""

    task: str
    options: Mapping[str, Any]
    directory: str
    reward: str
    processes: int
    timeout_s: float
    memory_bytes: int


def split_problems(
    pairs: Sequence[tuple[str, str]], train: int, held_out: int, name: str
) -> dict[str, list[Problem]]:
    """The first `train` pairs (prompt, answer) as the split "train", and the next `held_out` as "held_out".

    Raises ValueError when there are fewer pairs.
    """
    check_split(len(pairs), train, held_out, name)
    return {
        "train": [Problem(i, *pair) for i, pair in enumerate(pairs[:train])],
        "held_out": [Problem(i, *pair) for i, pair in enumerate(pairs[train : train + held_out])],
    }


def check_split(n: int, train: int, held_out: int, name: str) -> None:
    """Raise ValueError where n problems do not have `train` for training, one at least, and `held_out`."""
    if held_out < 0:
        raise ValueError(f"task {name}: held_out ({held_out}) must not be negative")
    if train < 1:
        raise ValueError(
            f"task {name}: train ({train}) must be at least 1; held_out takes {held_out} of {n} problems"
        )
    if n < train + held_out:
        raise ValueError(f"task {name}: has {n} problems, fewer than train + held_out ({train} + {held_out})")


def random_integers(
    n: int, low: np.ndarray | int, high: np.ndarray | int, seed: int, word: int
) -> np.ndarray:
    """n random integers in low .. high, both included, which depend on seed and word only. -> [n] int64."""
    u = uniform_range(n, seed, Stream.PROBLEMS, word)
    return (np.asarray(low) + np.floor(u * (np.asarray(high) - low + 1))).astype(np.int64)
