"""Which completions of a prompt mean the same: their classes.

A function of the user's runs in processes of its own, as rewards do (executor.py). Without one, two
completions mean the same where their texts are equal after strip().
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from ...files.reading import shown
from .base import RewardSettings
from .executor import CallError, Executor, Limits
from .problem import Problem

_MAKER = "zerokl.engine.tasks.equivalence_function:equivalence_function"


@dataclass(frozen=True)
class Equivalence:
    """executor: forms the classes by the user's function; None for equal text after strip()."""

    executor: Executor | None = None
    # Steps may ask side by side (train/ahead.py), and the processes serve one of them at a time.
    one_at_a_time: Lock = field(default_factory=Lock, compare=False, repr=False)

    def classes(self, problems: Sequence[Problem], groups: Sequence[Sequence[str]]) -> list[list[int]]:
        """The number of the class of each text. groups: the texts of each problem's completions.

        Raises ValueError that names the problem when the user's function fails.
        """
        if self.executor is None:
            stripped = [[text.strip() for text in texts] for texts in groups]
            return [[texts.index(text) for text in texts] for texts in stripped]
        try:
            with self.one_at_a_time:
                values = self.executor.map([(list(texts),) for texts in groups])
        except CallError as error:
            problem = problems[error.index]
            raise ValueError(f"equivalence: {error.reason} for {_place(problem)}{error.line}") from None
        for problem, texts, value in zip(problems, groups, values, strict=True):
            if not _are_classes(value, len(texts)):
                raise ValueError(f"equivalence: answered {shown(value)} for {_place(problem)}")
        return values


@contextmanager
def open_equivalence(
    name: str, settings: RewardSettings, say: Callable[[str], None] = print
) -> Iterator[Equivalence]:
    """The equivalence by the user's function `name`, or for "" by equal text. Its processes end with it.

    settings: their number and limits are those of the reward's processes. say: shows a line that the function
    printed. Raises ValueError for a function that cannot be imported.
    """
    if not name:
        yield Equivalence()
        return
    limits = Limits(settings.timeout_s, settings.memory_bytes, "task.reward_timeout_s")
    arguments = (name, settings.directory)
    with closing(Executor("equivalence", _MAKER, arguments, settings.processes, limits, say)) as executor:
        yield Equivalence(executor)


def _are_classes(value: Any, n: int) -> bool:
    """Whether these are the classes of n texts. A user's code may have written something else."""
    return isinstance(value, list) and len(value) == n and all(type(c) is int for c in value)


def _place(problem: Problem) -> str:
    return f"prompt {problem.id} ({shown(problem.prompt)})"
