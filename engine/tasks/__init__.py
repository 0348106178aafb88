"""Tasks by name: add, sort, countdown, jsonl, or a task of the user's as `module:object`."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .add import Add
from .base import Problem, Task
from .countdown import Countdown
from .jsonl import Jsonl
from .sort import Sort

# Larger rewards overflow the fp32 loss and the sums of squares of the advantages.
_LARGEST_REWARD = 1e18

TASKS: dict[str, Callable[..., Task]] = {"add": Add, "sort": Sort, "countdown": Countdown, "jsonl": Jsonl}
Reward = Callable[[Problem, str], float]


def load_task(name: str, options: Mapping[str, Any]) -> Task:
    """Make the task `name` with its options.

    Raises ValueError for an unknown name or option, and for an object of the user's that is no task.
    """
    factory = TASKS.get(name) or (load_object(name, "task") if ":" in name else None)
    if factory is None:
        raise ValueError(f"task: {name} is not known; choose {', '.join(TASKS)} or your own as module:object")
    try:
        task = factory(**options)
    except (ValueError, OSError):
        raise
    except Exception as error:  # the user's factory may raise anything
        raise ValueError(f"task {name}: {error}") from error
    if not isinstance(task, Task):
        raise ValueError(
            f"task {name}: {name} must make an object with `chat`, "
            "`problems(split)` and `reward(problem, completion)`"
        )
    return task


def problems_of(task: Task, name: str, split: str) -> list[Problem]:
    """The problems of one split of a task.

    Raises ValueError where the task raises, and where it gives something else than problems.
    """
    try:
        problems = list(task.problems(split))
    except (ValueError, OSError):
        raise
    except Exception as error:  # the user's method may raise anything
        raise ValueError(
            f"task {name}: problems({split!r}) raised {type(error).__name__} ({error})"
        ) from error
    wrong = next((p for p in problems if not (isinstance(p, Problem) and isinstance(p.prompt, str))), None)
    if wrong is not None:
        raise ValueError(
            f"task {name}: problems({split!r}) holds {wrong!r}, "
            "which is no Problem with a prompt that is a string"
        )
    return problems


def load_reward(task: Task, name: str) -> Reward:
    """The function `module:object`, or the task's own reward for an empty name."""
    return load_object(name, "reward") if name else task.reward


def load_object(name: str, what: str) -> Any:
    """Import `module:object`. The working directory is searched as well.

    Raises ValueError when the object cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything
        raise ValueError(
            f"{what}: {name} cannot be imported as module:object ({type(error).__name__}: {error})"
        ) from error


def rewards(reward: Reward, problems: Sequence[Problem], completions: Sequence[Sequence[str]]) -> np.ndarray:
    """The reward of each completion, [P, G] fp64.

    Raises ValueError that names prompt and sample when a reward fails, is not finite or is too large.
    """
    table = np.empty((len(problems), len(completions[0])), np.float64)
    for p, (problem, group) in enumerate(zip(problems, completions, strict=True)):
        for g, text in enumerate(group):
            try:
                value = float(reward(problem, text))
            except Exception as error:  # the user's function may raise anything
                raise ValueError(
                    f"reward: raised {type(error).__name__} ({error}) for {_place(problem, g, text)}"
                ) from error
            if not abs(value) <= _LARGEST_REWARD:
                raise ValueError(f"reward: is {value} for {_place(problem, g, text)}")
            table[p, g] = value
    return table


def _place(problem: Problem, sample: int, text: str) -> str:
    return f"prompt {problem.id} ({problem.prompt!r}), sample {sample} ({text!r})"
