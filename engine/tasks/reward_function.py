"""The reward as a process of the executor calls it.

Nothing here loads torch or numpy (see processes.py), unless the task is one of the user's.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from .problem import Problem
from .users_code import add_places, load_object


def reward_function(
    name: str, task: str, options: Mapping[str, Any], directory: str
) -> Callable[[Problem, str], float]:
    """The function `name`, which is module:function, or for an empty name the reward of the task.

    options, directory: see load_task. Raises ValueError.
    """
    add_places(directory)
    if name:
        reward = load_object(name, "reward")
    else:
        from .loading import load_task  # it loads numpy

        reward = load_task(task, options, directory).reward
    if not callable(reward):
        raise ValueError(f"reward: {name or task} is a {type(reward).__name__}; it must be a function")

    def number(problem: Problem, completion: str) -> float:
        value = reward(problem, completion)
        return float(_event_loop().run_until_complete(value) if hasattr(value, "__await__") else value)

    return number


@cache
def _event_loop() -> Any:
    """The event loop in which a reward's coroutines run: always one, to which a client of theirs belongs."""
    import asyncio  # few rewards need it

    return asyncio.new_event_loop()
