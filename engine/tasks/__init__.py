"""Tasks by name: add, sort, countdown, jsonl, or a task of the user's as `module:object`."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from ...verify.reading import shown
from .add import Add
from .answers import NAMED_REWARDS
from .base import Problem, Task
from .countdown import Countdown
from .jsonl import Jsonl
from .sort import Sort
from .users_code import call_user

# Larger rewards overflow the fp32 loss and the sums of squares of the advantages.
_LARGEST_REWARD = 1e18

TASKS: dict[str, Callable[..., Task]] = {"add": Add, "sort": Sort, "countdown": Countdown, "jsonl": Jsonl}
# More problems than this take all memory.
_LARGEST_OPTION, _LARGEST_SEED = 1_000_000, (1 << 32) - 1
# Options of the task jsonl that name a file.
_FILES = ("file", "held_out_file")
_KINDS = {
    (int,): "a whole number",
    (str,): "a string",
    (bool,): "true or false",
    (int, float): "a whole number, or a share between 0 and 1",
}
Reward = Callable[[Problem, str], float]


@dataclass(frozen=True)
class LoadedReward:
    """A reward, and what is known of it beside its values."""

    function: Reward
    binary: bool  # whether every value is 0 or 1, so that their mean is an accuracy
    check: Callable[[Problem], None] | None  # raises ValueError for an answer that the reward cannot read

    def __call__(self, problem: Problem, completion: str) -> float:
        """The reward of a completion's text."""
        return self.function(problem, completion)


def load_task(name: str, options: Mapping[str, Any], directory: str = "") -> Task:
    """Make the task `name` with its options.

    directory: where modules of the user's, and files with relative names in `options`, are looked up; empty
    is the current one.

    Raises ValueError for an unknown name or option, and for an object of the user's that is no task.
    """
    for place in filter(None, (directory, os.getcwd())):
        if place not in sys.path:
            sys.path.append(place)
    factory = TASKS.get(name) or (load_object(name, "task") if ":" in name else None)
    if factory is None:
        known = ", ".join(TASKS)
        raise ValueError(f"task: {name[:100]} is not known; choose {known} or your own as module:object")
    if name in TASKS:
        _check_options(name, factory, options)
        files = {k: os.path.join(directory, options[k]) for k in _FILES if options.get(k)}
        options = {**options, **files} if name == "jsonl" else options
        task = factory(**options)
    else:
        task = call_user(f"task {name}:", "", _made_or_refused, factory, options)
        if isinstance(task, ValueError):
            raise task
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
    problems = call_user(f"task {name}: problems({split!r})", "", lambda: list(task.problems(split)))
    wrong = next((p for p in problems if not (isinstance(p, Problem) and isinstance(p.prompt, str))), None)
    if wrong is not None:
        raise ValueError(
            f"task {name}: problems({split!r}) holds {shown(wrong)}, "
            "which is no Problem with a prompt that is a string"
        )
    return problems


def load_reward(task: Task, name: str) -> LoadedReward:
    """The reward exact, numeric or math, the function `module:object`, or the task's own for an empty name.

    It is binary where the task, or the function, has an attribute `binary` that is True.

    Raises ValueError for an unknown name.
    """
    if name and name not in NAMED_REWARDS and ":" not in name:
        known = ", ".join(NAMED_REWARDS)
        raise ValueError(f"reward: {name[:100]} is not known; choose {known} or your own as module:function")
    owner = (NAMED_REWARDS.get(name) or load_object(name, "reward")) if name else task
    function = owner if name else task.reward
    return LoadedReward(function, getattr(owner, "binary", False) is True, getattr(owner, "check", None))


def check_answers(reward: LoadedReward, problems: Sequence[Problem]) -> None:
    """Raise ValueError for the first problem whose answer the reward cannot read."""
    for problem in problems if reward.check else ():
        reward.check(problem)


def load_object(name: str, what: str) -> Any:
    """Import `module:object`. The working directory is searched as well.

    Raises ValueError when the object cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    what = f"{what}: {name[:200]} cannot be imported as module:object; it"
    return call_user(what, "", lambda: getattr(importlib.import_module(module), attribute))


def _made_or_refused(factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """The task, or the ValueError with which it refuses its options in its own words."""
    try:
        return factory(**options)
    except ValueError as refusal:
        return refusal


def rewards(reward: Reward, problems: Sequence[Problem], completions: Sequence[Sequence[str]]) -> np.ndarray:
    """The reward of each completion, [P, G] fp64.

    Raises ValueError that names prompt and sample when a reward fails, is not finite or is too large, and
    when a binary one is neither 0 nor 1.
    """
    table = np.empty((len(problems), len(completions[0])), np.float64)
    for p, (problem, group) in enumerate(zip(problems, completions, strict=True)):
        for g, text in enumerate(group):
            where = f" for {_place(problem, g, text)}"
            value = call_user("reward:", where, _number_of, reward, problem, text)
            if not abs(value) <= _LARGEST_REWARD:
                raise ValueError(f"reward: is {value} for {_place(problem, g, text)}")
            if getattr(reward, "binary", False) and value not in (0.0, 1.0):
                raise ValueError(
                    f"reward: is {value} for {_place(problem, g, text)}, and its `binary` says 0 or 1"
                )
            table[p, g] = value
    return table


def _number_of(reward: Reward, problem: Problem, text: str) -> float:
    return float(reward(problem, text))


def _place(problem: Problem, sample: int, text: str) -> str:
    return f"prompt {problem.id} ({shown(problem.prompt)}), sample {sample} ({shown(text)})"


def _check_options(name: str, factory: Callable[..., Task], options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that a task of ours does not have, or of another type or size."""
    parameters = inspect.signature(factory).parameters
    for option, value in options.items():
        if option not in parameters:
            raise ValueError(
                f"task {name}: option {option[:100]} is not known; choose {', '.join(parameters)}"
            )
        annotation = parameters[option].annotation
        kinds = get_args(annotation) or (annotation,)
        if type(value) not in kinds:
            raise ValueError(f"task {name}: {option} ({shown(value)}) must be {_KINDS[kinds]}")
        largest = _LARGEST_SEED if option == "seed" else _LARGEST_OPTION
        if type(value) is int and not 0 <= value <= largest:
            raise ValueError(f"task {name}: {option} ({shown(value)}) must lie in 0 to {largest:,}")
