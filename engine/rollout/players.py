"""Who plays the episodes of a task: its reward or its environments, and a player over them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..config.run_config import EnvironmentConfig, TaskConfig
from ..tasks.base import Problem, Task
from ..tasks.environment import EnvironmentTask
from ..tasks.environments import Environments, EnvironmentSettings, open_environments
from ..tasks.pairs import Pairs
from ..tasks.rendering import Renderer
from ..tasks.rewards import Reward, open_reward
from ..tasks.tokenizer import Tokenizer
from .budgets import BudgetPlayer, DrawnAnswers
from .episodes import CompletionPlayer, EpisodePlayer
from .given_answers import AnswerPlayer, GivenAnswers
from .given_pairs import PairPlayer
from .stopwatch import Stopwatch
from .turns import TurnLimits, TurnPlayer

# What gives the rewards of a task.
Judge = Reward | Environments


@contextmanager
def open_judge(
    task: Task | EnvironmentTask,
    config: TaskConfig,
    environment: EnvironmentConfig,
    say: Callable[[str], None] = print,
    given_answers: bool = True,
) -> Iterator[Judge]:
    """The environments of a task that has one, or else its reward. Their processes end with the context.

    say: shows a line that they printed. given_answers: with task.answer_prefix, whether the problem's answer
    follows, whose probability is the reward; otherwise the model's own does, and has a reward by its text.
    Raises ValueError where they cannot be made.
    """
    if isinstance(task, Pairs) and config.reward:
        raise ValueError(f"task.reward ({config.reward}): pairs are ranked by their scores; leave it empty")
    if config.answer_prefix:
        _check_one_completion(task, config)
    if config.answer_prefix and given_answers:
        _check_no_reward(config)
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


def _check_no_reward(config: TaskConfig) -> None:
    """Raise ValueError for a reward beside the probability of the answer."""
    if config.reward:
        raise ValueError(
            f"task.reward ({config.reward}) with task.answer_prefix: the probability of the answer is the "
            "reward; leave one of them out"
        )


def _check_one_completion(task: Task | EnvironmentTask, config: TaskConfig) -> None:
    """Raise ValueError for a task without one completion, after which an answer can stand."""
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
    answers: GivenAnswers | DrawnAnswers | None = None,
) -> EpisodePlayer:
    """Plays the episodes of a task. judge: see open_judge; whoever opened it closes it.

    limits, render: of trajectories of many turns. say: shows a line for one that ended in an error.
    stopwatch: measures rewards and environments. answers: what follows a reasoning: the problem's answer,
    which is scored, or the model's own; None where there are no reasonings.

    Raises ValueError (see Renderer, AnswerPlayer, BudgetPlayer).
    """
    if isinstance(answers, GivenAnswers):
        return AnswerPlayer(tokenizer, task.chat, answers)
    if answers:
        return BudgetPlayer(tokenizer, judge, task.chat, answers, stopwatch)
    if isinstance(task, Pairs):
        return PairPlayer(tokenizer, task.chat)
    if not isinstance(task, EnvironmentTask):
        return CompletionPlayer(tokenizer, judge, task.chat, stopwatch)
    renderer = Renderer(tokenizer, task.chat, render, judge.about.tools)
    return TurnPlayer(tokenizer, judge, renderer, limits, say, stopwatch)
