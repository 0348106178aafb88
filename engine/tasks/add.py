"""Addition: "12+7=" -> "19"."""

import numpy as np

from ...kernels.philox import Stream, permutation
from .base import Problem, SplitTask, split_problems


class Add(SplitTask):
    """All pairs of numbers 0 .. max_value, in a random order. train and held_out are disjoint parts of it."""

    def __init__(self, max_value: int = 99, train: int = 512, held_out: int = 256, seed: int = 0):
        if not 1 <= max_value <= 9999:  # all pairs are put into an order
            raise ValueError(f"task add: max_value ({max_value}) must be at least 1 and at most 9999")
        side = max_value + 1
        order = permutation(side * side, seed, Stream.PROBLEMS)[: train + held_out]
        pairs = [
            (f"{a}+{b}=", str(a + b))
            for a, b in zip(*(x.tolist() for x in np.divmod(order, side)), strict=True)
        ]
        self._splits = split_problems(pairs, train, held_out, "add")

    def reward(self, problem: Problem, completion: str) -> float:
        """1.0 for the exact sum, else 0.0."""
        return float(completion == problem.answer)
