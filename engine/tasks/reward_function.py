"""The reward as a process of the executor calls it.

Nothing here loads torch or numpy (see processes/process.py), unless the task is one of the user's.
"""

from collections.abc import Mapping
from typing import Any

from .answers import NAMED_REWARDS
from .problem import Problem
from .users_code import add_places, awaited, load_object


class RewardFunction:
    """Of a problem and a completion: the reward. Of a problem alone: why its answer is refused, or ""."""

    def __init__(self, owner: Any, function: Any):
        self._function, self._check = function, getattr(owner, "check", None)
        self.about = {"binary": getattr(owner, "binary", False) is True, "checks": self._check is not None}

    def __call__(self, problem: Problem, completion: str | None = None) -> float | str:
        """Raises whatever the reward or its check raises; a ValueError of a check is its answer."""
        if completion is not None:
            return _number(awaited(self._function(problem, completion)))
        try:
            awaited(self._check(problem))
        except ValueError as refusal:
            return str(refusal) or "reward: its check refuses the answer"
        return ""


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise TypeError(f"its value is of the type {kind}; it must be a number") from None


def reward_function(name: str, task: str, options: Mapping[str, Any], directory: str) -> RewardFunction:
    """The reward of this name, or module:function; for an empty name the reward of the task.

    options, directory: see load_task. Raises ValueError.
    """
    # For good: this process exists for this task alone. The reward may import modules whenever it is called,
    # and a problem when it is unpickled.
    add_places(directory)
    if name or task == "jsonl":  # the reward of jsonl is known without its file, which may be large
        owner = NAMED_REWARDS.get(name or "math") or load_object(name, "reward", directory)
        function = owner
    else:
        from .loading import load_task  # it loads numpy

        owner = load_task(task, options, directory)
        function = owner.reward
    if not callable(function):
        raise ValueError(f"reward: {name or task} is a {type(function).__name__}; it must be a function")
    return RewardFunction(owner, function)
