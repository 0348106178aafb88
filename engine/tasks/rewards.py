"""The rewards of completions.

The rewards of add, sort and countdown are plain arithmetic, and are computed in this process. All others run
in processes of their own (executor.py): those that a user wrote, and math-verify's, which may take for ever.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...verify.reading import shown
from .base import Problem, Task
from .executor import CallError, Executor, Limits
from .users_code import call_user

# Larger rewards overflow the fp32 loss and the sums of squares of the advantages.
_LARGEST_REWARD = 1e18
# More processes than this are not started unless they are asked for.
_MOST_PROCESSES = 16
# Tasks of ours whose rewards are computed in this process.
_IN_PROCESS = ("add", "sort", "countdown")
# Rewards of tasks of ours that are computed in processes of their own.
_OWN_PROCESSES = {"jsonl": "zerokl.engine.tasks.jsonl:solved"}
_MAKER = "zerokl.engine.tasks.reward_function:reward_function"

Reward = Callable[[Problem, str], float]


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


@contextmanager
def open_reward(
    task: Task, settings: RewardSettings, say: Callable[[str], None] = print
) -> Iterator[Reward | Executor]:
    """The reward of a task, or of settings.reward, for `rewards`. Its processes end with the context.

    say: shows a line that a reward printed. Raises ValueError for a reward that cannot be made.
    """
    if not settings.reward and settings.task in _IN_PROCESS:
        yield task.reward
        return
    name = settings.reward or _OWN_PROCESSES.get(settings.task, "")
    arguments = (name, settings.task, dict(settings.options), settings.directory)
    limits = Limits(settings.timeout_s, settings.memory_bytes or _memory_bytes() // 2)
    executor = Executor(_MAKER, arguments, settings.processes or _processes(), limits, say)
    try:
        yield executor
    finally:
        executor.close()


def rewards(
    reward: Reward | Executor, problems: Sequence[Problem], completions: Sequence[Sequence[str]]
) -> np.ndarray:
    """The reward of each completion, [P, G] fp64.

    Raises ValueError that names prompt and sample when a reward fails, is not finite or is too large.
    """
    P, G = len(problems), len(completions[0])
    pairs = [(problem, text) for problem, group in zip(problems, completions, strict=True) for text in group]
    values = _from_processes(reward, pairs, G) if isinstance(reward, Executor) else _here(reward, pairs, G)
    for i, value in enumerate(values):
        if not abs(value) <= _LARGEST_REWARD:
            raise ValueError(f"reward: is {value} for {_place(pairs, i, G)}")
    return np.array(values, np.float64).reshape(P, G)


def _here(reward: Reward, pairs: Sequence[tuple[Problem, str]], G: int) -> list[float]:
    return [
        call_user("reward:", f" for {_place(pairs, i, G)}", lambda pair=pair: float(reward(*pair)))
        for i, pair in enumerate(pairs)
    ]


def _from_processes(executor: Executor, pairs: Sequence[tuple[Problem, str]], G: int) -> list[float]:
    try:
        return executor.map(pairs)
    except CallError as error:
        place = _place(pairs, error.index, G)
        raise ValueError(f"reward: {error.reason} for {place}{error.line}") from None


def _place(pairs: Sequence[tuple[Problem, str]], i: int, G: int) -> str:
    problem, text = pairs[i]
    return f"prompt {problem.id} ({shown(problem.prompt)}), sample {i % G} ({shown(text)})"


def _processes() -> int:
    """A process for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_PROCESSES)


def _memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
