"""Tasks by name: those of TASKS, or a task of the user's as `module:object`."""

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, get_args

from ...files.reading import shown
from .add import Add
from .base import Problem, Task
from .calculator import Calculator
from .countdown import Countdown
from .environment import EnvironmentTask
from .guard import guarded
from .guesses import Guesses
from .jsonl import Jsonl
from .nim import Nim
from .pairs import Pairs
from .python_tool import Python
from .sort import Sort
from .sums import Sums
from .users_code import importable, load_object
from .wordle import Wordle

TASKS: dict[str, Callable[..., Task | EnvironmentTask]] = {
    "add": Add,
    "sort": Sort,
    "sums": Sums,
    "countdown": Countdown,
    "jsonl": Jsonl,
    "pairs": Pairs,
    "calculator": Calculator,
    "guesses": Guesses,
    "wordle": Wordle,
    "nim": Nim,
    "python": Python,
}
# More problems than this take all memory.
_LARGEST_OPTION, _LARGEST_SEED = 1_000_000, (1 << 32) - 1
# Options that name a file, of the tasks that read files.
_FILES, _OF_FILES = ("file", "held_out_file"), ("jsonl", "pairs", "python")
_KINDS = {
    (int,): "a whole number",
    (str,): "a string",
    (bool,): "true or false",
    (int, float): "a whole number, or a share between 0 and 1",
}


def load_task(name: str, options: Mapping[str, Any], directory: str = "") -> Task | EnvironmentTask:
    """Make the task `name` with its options.

    directory: where modules of the user's, and files with relative names in `options`, are looked up; empty
    is the current one.

    Raises ValueError for an unknown name or option, and for an object of the user's that is no task, or that
    changes the state of this process (see guard.py).
    """
    factory = TASKS.get(name)
    if factory is None and ":" in name:
        factory = guarded(f"task {name}:", load_object, name, "task", directory, may_draw=True)
    if factory is None:
        known = ", ".join(TASKS)
        raise ValueError(f"task: {name[:100]} is not known; choose {known} or your own as module:object")
    if name in TASKS:
        _check_options(name, factory, options)
        files = {k: os.path.join(directory, options[k]) for k in _FILES if options.get(k)}
        options = {**options, **files} if name in _OF_FILES else options
        task = factory(**options)
    else:
        with importable(directory):
            task = guarded(f"task {name}:", _made_or_refused, factory, options, may_draw=True)
        if isinstance(task, ValueError):
            raise task
    if not isinstance(task, Task | EnvironmentTask):
        raise ValueError(
            f"task {name}: {name} must make an object with `chat`, `problems(split)`, and "
            "`reward(problem, completion)` or `environment()`"
        )
    return task


def problems_of(task: Task | EnvironmentTask, name: str, split: str, directory: str = "") -> list[Problem]:
    """The problems of one split of a task. directory: see load_task.

    Raises ValueError where the task raises, and where it gives something else than problems.
    """
    what = f"task {name}: problems({split!r})"
    with importable(directory):
        problems = guarded(what, lambda: list(task.problems(split)), may_draw=True)
    wrong = next((p for p in problems if not (isinstance(p, Problem) and isinstance(p.prompt, str))), None)
    if wrong is not None:
        raise ValueError(
            f"task {name}: problems({split!r}) holds {shown(wrong)}, "
            "which is no Problem with a prompt that is a string"
        )
    return problems


def _made_or_refused(factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """The task, or the ValueError with which it refuses its options in its own words."""
    try:
        return factory(**options)
    except ValueError as refusal:
        return refusal


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
