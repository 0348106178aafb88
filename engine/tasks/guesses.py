"""Countdown with several guesses: "13,20:33=" -> "20-13", to which the environment says "7;", and so on.

The task is countdown's (countdown.py); the reward is 1 for a right guess, however many were wrong before.

By default there are two numbers. Of three up to 9 there are 1,345 problems only, and a small model learns
them by heart.
"""

from .base import Problem, SplitTask
from .countdown import Countdown, evaluate
from .environment import EnvironmentKey, Observation


class GuessEnvironment:
    """To a wrong guess it says the value, or "?" where the expression has none or not these numbers."""

    def __init__(self, task: "Guesses", guesses: int):
        self._task, self._left = task, guesses

    def reset(self, problem: Problem, key: EnvironmentKey) -> str:
        self._problem = problem
        return problem.prompt

    def step(self, ids: list[int], text: str) -> Observation:
        if self._task.solves(self._problem, text):
            return Observation(reward=1.0, done=True)
        self._left -= 1
        return Observation(f"{_value(text)};", done=not self._left)


class Guesses(SplitTask):
    """The problems of countdown, with other defaults. guesses: of a trajectory."""

    def __init__(
        self,
        guesses: int = 3,
        numbers: int = 2,
        max_number: int = 60,
        max_target: int = 99,
        train: int = 2000,
        held_out: int = 256,
        seed: int = 0,
    ):
        if guesses < 1:
            raise ValueError(f"task guesses: guesses ({guesses}) must be at least 1")
        self._guesses = guesses
        self._countdown = Countdown(numbers, max_number, max_target, train, held_out, seed)
        self._splits = {split: self._countdown.problems(split) for split in ("train", "held_out")}

    def environment(self) -> GuessEnvironment:
        return GuessEnvironment(self, self._guesses)

    def solves(self, problem: Problem, text: str) -> bool:
        """Whether an expression has the right numbers and value."""
        return self._countdown.reward(problem, text) == 1.0


def _value(text: str) -> str:
    try:
        value = evaluate(text)[0]
    except (ValueError, ZeroDivisionError):
        return "?"
    return str(value) if len(str(value)) <= 9 else "?"
