"""Who plays the episodes of a task: its reward or its environments, and a player over them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..config import EnvironmentConfig, TaskConfig
from ..stopwatch import Stopwatch
from ..tasks.base import Problem, Task
from ..tasks.environment import EnvironmentTask
from ..tasks.environments import Environments, EnvironmentSettings, open_environments
from ..tasks.pairs import Pairs
from ..tasks.rendering import Renderer
from ..tasks.rewards import Reward, open_reward
from ..tasks.tokenizer import Tokenizer
from .answers import AnswerPlayer, GivenAnswers
from .episodes import CompletionPlayer, EpisodePlayer
from .pairs import PairPlayer
from .turns import TurnLimits, TurnPlayer

# What gives the rewards of a task.
Judge = Reward | Environments


@contextmanager
def open_judge(
    task: Task | EnvironmentTask,
    config: TaskConfig,
    environment: EnvironmentConfig,
    say: Callable[[str], None] = print,
) -> Iterator[Judge]:
    """The environments of a task that has one, or else its reward. Their processes end with the context.

    say: shows a line that they printed. Raises ValueError where they cannot be made.
    """
    if isinstance(task, Pairs) and config.reward:
        raise ValueError(f"task.reward ({config.reward}): pairs are ranked by their scores; leave it empty")
    if config.answer_prefix:
        _check_answers(task, config)
        yield Reward(_no_reward)
        return
    if not isinstance(task, EnvironmentTask):
        with open_reward(task, config.reward_settings, say) as reward:
            yield reward
        return
    if config.reward:
        raise ValueError(
            f"task.reward ({config.reward}): task {config.name} has an environment, which gives the rewards"
        )
    settings = EnvironmentSettings(
        config.name,
        config.options,
        config.directory,
        environment.processes,
        environment.timeout_s,
        environment.memory_bytes,
    )
    with open_environments(settings, say) as environments:
        yield environments


def _check_answers(task: Task | EnvironmentTask, config: TaskConfig) -> None:
    """Raise ValueError for a task whose answers cannot be the reward."""
    if config.reward:
        raise ValueError(
            f"task.reward ({config.reward}) with task.answer_prefix: the probability of the answer is the "
            "reward; leave one of them out"
        )
    if isinstance(task, EnvironmentTask | Pairs):
        raise ValueError(
            f"task.answer_prefix: task {config.name} has no answer that could follow one completion; leave "
            "it out, or take a task such as jsonl"
        )


def _no_reward(problem: Problem, completion: str) -> float:
    raise AssertionError("an answer's probability is the reward, and no text has one")


def turn_limits(environment: EnvironmentConfig, max_tokens: int, context: int) -> TurnLimits:
    """The limits of a trajectory. max_tokens: of a turn. context: of whoever samples, in tokens."""
    max_turns = environment.max_turns
    return TurnLimits(
        max_turns,
        environment.max_tokens or max_turns * max_tokens,
        min(environment.context or context, context),
    )


def make_player(
    task: Task | EnvironmentTask,
    judge: Judge,
    tokenizer: Tokenizer,
    limits: TurnLimits,
    render: str,
    say: Callable[[str], None] = print,
    stopwatch: Stopwatch | None = None,
    answers: GivenAnswers | None = None,
) -> EpisodePlayer:
    """Plays the episodes of a task. judge: see open_judge; whoever opened it closes it.

    limits, render: of trajectories of many turns. say: shows a line for one that ended in an error.
    stopwatch: measures rewards and environments. answers: of the problems, where they are scored.

    Raises ValueError (see Renderer, AnswerPlayer).
    """
    if answers:
        return AnswerPlayer(tokenizer, task.chat, answers)
    if isinstance(task, Pairs):
        return PairPlayer(tokenizer, task.chat)
    if not isinstance(task, EnvironmentTask):
        return CompletionPlayer(tokenizer, judge, task.chat, stopwatch)
    renderer = Renderer(tokenizer, task.chat, render, judge.tools)
    return TurnPlayer(tokenizer, judge, renderer, limits, say, stopwatch)
