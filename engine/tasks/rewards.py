"""The rewards of completions.

Rewards of ours that are plain arithmetic are computed in this process. All others run in processes of their
own (executor.py): those that a user wrote, and math-verify's, which may take for ever.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np

from ...files.reading import shown
from .answers import NAMED_REWARDS
from .base import Problem, RewardSettings, Task
from .environment import LARGEST_REWARD
from .executor import CallError, Executor, Limits

# Tasks and rewards of ours that are computed in this process.
_IN_PROCESS = ("add", "sort", "countdown", "pairs", "exact", "numeric")
_MAKER = "zerokl.engine.tasks.reward_function:reward_function"


@dataclass(frozen=True)
class Reward:
    """A reward, and what is known of it beside its values."""

    function: Callable[[Problem, str], float] | Executor
    binary: bool = False  # whether every value is 0 or 1, so that their mean is an accuracy
    # Refuses an answer that the reward cannot read.
    checker: Callable[[Problem], None] | Executor | None = None

    def values(self, problems: Sequence[Problem], completions: Sequence[Sequence[str]]) -> np.ndarray:
        """The reward of each completion, [P, G] fp64.

        Raises ValueError that names prompt and sample when a reward fails, is not finite or is too large, and
        when a binary one is neither 0 nor 1.
        """
        P, G = len(problems), len(completions[0])
        groups = zip(problems, completions, strict=True)
        pairs = [(problem, text) for problem, texts in groups for text in texts]
        numbers = self._numbers(pairs, G)
        for i, number in enumerate(numbers):
            in_range = abs(number) <= LARGEST_REWARD
            if not in_range or (self.binary and number not in (0.0, 1.0)):
                reason = ", and its `binary` says 0 or 1" if in_range else ""
                raise ValueError(f"reward: is {number} for {_place(pairs, i, G)}{reason}")
        return np.array(numbers, np.float64).reshape(P, G)

    def check_answers(self, problems: Sequence[Problem]) -> None:
        """Raise ValueError for the first problem whose answer the reward cannot read."""
        if isinstance(self.checker, Executor):
            try:
                refusals = self.checker.map([(problem,) for problem in problems])
            except CallError as error:
                problem = problems[error.index]
                where = f"problem {problem.id} ({shown(problem.answer)})"
                raise ValueError(f"reward: its check {error.reason} for {where}{error.line}") from None
            if refusal := next(filter(None, refusals), ""):
                raise ValueError(refusal)
        elif self.checker:
            for problem in problems:
                self.checker(problem)

    def _numbers(self, pairs: Sequence[tuple[Problem, str]], G: int) -> list[float]:
        if not isinstance(self.function, Executor):
            return [self.function(*pair) for pair in pairs]
        try:
            return self.function.map(pairs)
        except CallError as error:
            place = _place(pairs, error.index, G)
            raise ValueError(f"reward: {error.reason} for {place}{error.line}") from None


@contextmanager
def open_reward(task: Task, settings: RewardSettings, say: Callable[[str], None] = print) -> Iterator[Reward]:
    """The reward of `settings`, or the task's own where they name none. Its processes end with the context.

    A reward is binary where the task, or the function, has an attribute `binary` that is True.
    say: shows a line that a reward printed. Raises ValueError for an unknown reward, or one that cannot be
    made.
    """
    name = settings.reward
    if name and name not in NAMED_REWARDS and ":" not in name:
        known = ", ".join(NAMED_REWARDS)
        raise ValueError(f"reward: {name[:100]} is not known; choose {known} or your own as module:function")
    if (name or settings.task) in _IN_PROCESS:
        owner = NAMED_REWARDS[name] if name else task
        function = owner if name else task.reward
        yield Reward(function, owner.binary, getattr(owner, "check", None))
        return
    arguments = (name, settings.task, dict(settings.options), settings.directory)
    limits = Limits(settings.timeout_s, settings.memory_bytes, "task.reward_timeout_s")
    with closing(Executor("reward", _MAKER, arguments, settings.processes, limits, say)) as executor:
        yield Reward(executor, executor.about["binary"], executor if executor.about["checks"] else None)


def _place(pairs: Sequence[tuple[Problem, str]], i: int, G: int) -> str:
    problem, text = pairs[i]
    return f"prompt {problem.id} ({shown(problem.prompt)}), sample {i % G} ({shown(text)})"
