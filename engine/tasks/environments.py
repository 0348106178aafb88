"""Environments as the run sees them: trajectories and games are begun, and answer to turns.

They are played in processes of their own (executor.py, sessions.py). Those of a call run side by side.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...files.reading import one_line, shown
from .environment import DONE, LARGEST_REWARD, EnvironmentKey, Turn, checked_content
from .executor import CallError, Executor, Limits
from .problem import Problem

_MAKER = "zerokl.engine.tasks.sessions:environment_function"


@dataclass(frozen=True)
class EnvironmentSettings:
    """Which environment a run has, and how it is played. EnvironmentConfig says what each of them is."""

    task: str
    options: Mapping[str, Any]
    directory: str
    processes: int
    timeout_s: float
    memory_bytes: int


class Answer(NamedTuple):
    """What an environment has answered to a turn; see Observation."""

    content: Any
    rewards: list[float]  # of each player
    end: str  # how the trajectory ends; empty where it goes on
    player: int
    history: str = ""  # hash of all answers so far


class Failure(NamedTuple):
    """Why an environment has no answer, in words. timed_out: it took too long."""

    reason: str
    timed_out: bool


@dataclass
class Game:
    """A trajectory, or the trajectories of all players of a game, as their environment has seen it."""

    problem: Problem
    key: EnvironmentKey
    turns: list[Turn] = field(default_factory=list)
    history: str = ""  # hash of all answers so far

    def answered(self, answer: Answer) -> None:
        """Take note of an answer; the next turn follows it."""
        self.history = answer.history


@dataclass(frozen=True)
class AboutEnvironments:
    """What the environments of a task say of themselves.

    players: of a game; 1 otherwise. binary: whether the reward of a trajectory is 0 or 1 by the task's own
    word. tools: that the chat template names. tool_calls: in which form the model calls them; may be empty.
    """

    players: int
    binary: bool
    tools: list[dict[str, Any]] | None
    tool_calls: str


class Environments:
    """The environments of a run."""

    def __init__(self, executor: Executor):
        self._executor, self._asked = executor, {}
        self.about = AboutEnvironments(**executor.about)

    def ask(self, game: Game) -> None:
        """Let an environment answer to the last turn of its game; without a turn, give its first content.

        It begins at once, beside others. `answers` gives what it answers.
        """
        call, home = (game.problem, game.key, game.turns, game.history), game.key.prompt + game.key.sample
        self._asked[self._executor.submit(call, home % self._executor.n)] = game

    def answers(self, wait: bool) -> list[tuple[Game, Answer | Failure]]:
        """The games that were asked and have an answer. A Failure ends no other game.

        wait: for one at least, if any was asked.
        """
        answers = self._executor.collect(wait)
        return [(self._asked.pop(ticket), self._checked(answers[ticket])) for ticket in sorted(answers)]

    def close_games(self) -> None:
        """Drop all games that are still open."""
        n = self._executor.n
        self._executor.attempt([()] * n, range(n))

    def _checked(self, answer: Any) -> Answer | Failure:
        """An answer as it must be. A user's code may have written another one into the connection."""
        if isinstance(answer, CallError):
            return Failure(one_line(f"{answer.reason}{answer.line}"), answer.timed_out)
        try:
            rewards = [float(r) for r in answer["rewards"]]
            players = self.about.players
            fits = len(rewards) == players and all(abs(r) <= LARGEST_REWARD for r in rewards)
            if not fits or type(answer["done"]) is not bool or answer["player"] not in range(players):
                raise ValueError
            end, history = DONE if answer["done"] else "", str(answer["history"])
            content = checked_content(answer["content"])
            return Answer(content, rewards, end, answer["player"], history)
        except (KeyError, TypeError, ValueError, RecursionError):
            return Failure(f"answered {shown(answer)}, which no environment does", False)


@contextmanager
def open_environments(
    settings: EnvironmentSettings, say: Callable[[str], None] = print
) -> Iterator[Environments]:
    """The environments of a task. Their processes end with the context.

    say: shows a line that an environment printed. Raises ValueError where none can be made.
    """
    arguments = (settings.task, dict(settings.options), settings.directory)
    limits = Limits(settings.timeout_s, settings.memory_bytes, "environment.timeout_s")
    with closing(Executor("environment", _MAKER, arguments, settings.processes, limits, say)) as executor:
        yield Environments(executor)
