"""What a task is: problems with known answers and a reward for a completion's text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from ...kernels.philox import Stream, uniform_range


@dataclass(frozen=True)
class Problem:
    """One problem. `id` is its place in its split."""

    id: int
    prompt: str
    answer: str  # a correct completion, or what the reward compares with


@runtime_checkable
class Task(Protocol):
    """A task of the user's own has these members; a base class is not needed."""

    chat: bool  # put the prompt through the tokenizer's chat template, if it has one

    def problems(self, split: str) -> Sequence[Problem]:
        """All problems of a split, "train" or "held_out", the same in every call."""
        ...

    def reward(self, problem: Problem, completion: str) -> float:
        """A finite number; 1.0 is solved, 0.0 is not."""
        ...


def split_problems(
    pairs: Sequence[tuple[str, str]], train: int, held_out: int, name: str
) -> dict[str, list[Problem]]:
    """The first `train` pairs and the `held_out` after them.

    Raises ValueError when there are not that many.
    """
    if train < 1 or held_out < 0:
        raise ValueError(
            f"task {name}: train ({train}) must be at least 1 and held_out ({held_out}) not negative"
        )
    if len(pairs) < train + held_out:
        raise ValueError(
            f"task {name}: has {len(pairs)} problems, fewer than train + held_out ({train} + {held_out})"
        )
    return {
        "train": [Problem(i, *pair) for i, pair in enumerate(pairs[:train])],
        "held_out": [Problem(i, *pair) for i, pair in enumerate(pairs[train : train + held_out])],
    }


def random_integers(
    n: int, low: np.ndarray | int, high: np.ndarray | int, seed: int, word: int
) -> np.ndarray:
    """n reproducible integers in low .. high, both included. -> [n] int64."""
    u = uniform_range(n, seed, Stream.PROBLEMS, word)
    return (np.asarray(low) + np.floor(u * (np.asarray(high) - low + 1))).astype(np.int64)
