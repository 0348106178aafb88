"""An environment: what a model acts in, over several turns. A tool, a game, a partner of a conversation.

    class Guess:
        def reset(self, problem, key):
            self.secret = problem.answer
            return problem.prompt

        def step(self, ids, text):
            return Observation("yes", reward=1.0, done=True) if text == self.secret else Observation("no")

A task has an environment where it has a method `environment()`, which makes one for each trajectory. Such a
task needs no `reward`. Both methods may be `async`. `close()` is called at the end, where there is one.

An environment runs in a process of its own kind (sessions.py). It may be played again from its first turn, in
another process, after a neighbour's crash or in `zerokl verify run`. So all that it does must follow from the
problem, the key and the turns; what it draws at random comes from the key.

In a game of several players the model plays all of them. Each player has a trajectory of its own, with what
that player sees. `players` says how many there are, and an Observation says who moves next.

Nothing here loads torch or numpy (see processes/process.py).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ...files.reading import shown
from .problem import Problem
from .tool_calls import ToolCalls

# A text; messages of the chat template, each with `role` and `content`; or token ids.
Content = str | Sequence[dict[str, Any]] | Sequence[int]

# The longest content of one answer: characters of a text, of messages as JSON, or ids. A tokenizer takes a
# second for as many characters, and more than this fit into no context but the largest.
LONGEST_CONTENT = 1 << 18
# Larger rewards overflow the fp32 loss and the sums of squares of the advantages.
LARGEST_REWARD = 1e18

# How a trajectory ends. Those in VOID are neither trained on nor compared, and count in no group's mean.
DONE, TURNS, TOKENS, CONTEXT, TIME_LIMIT, ERROR = "done", "turns", "tokens", "context", "time limit", "error"
ENDS = (DONE, TURNS, TOKENS, CONTEXT, TIME_LIMIT, ERROR)
VOID = (TIME_LIMIT, ERROR)


class EnvironmentKey(NamedTuple):
    """The key of an environment's random numbers: one for each trajectory, or for each game."""

    seed: int
    step: int
    stream: int
    prompt: int  # the place of its prompt in the step
    sample: int

    def random(self, *words: int | str) -> Random:
        """Random numbers of this trajectory. words: for several independent sequences."""
        return _random((*self, *words))

    def group_random(self, *words: int | str) -> Random:
        """Random numbers that all trajectories of a prompt have in common."""
        return _random((*self[:-1], *words))


def _random(key: tuple[int | str, ...]) -> Random:
    return Random(int.from_bytes(hashlib.sha256(repr(key).encode()).digest(), "big"))


@dataclass(frozen=True)
class Observation:
    """What an environment answers to a turn.

    content: what the next player reads. A player's first content is its prompt; a text is then a user's turn
    of the chat template, as a later text is. It is of no use where the trajectory is done.
    reward: of the turn; in a game a number for each player. The reward of a trajectory is the sum.
    player: who moves next.
    """

    content: Content = ""
    reward: float | Sequence[float] = 0.0
    done: bool = False
    player: int = 0


class Turn(NamedTuple):
    """A turn of the model, as its environment reads it; see Environment.step."""

    ids: list[int]
    text: str
    calls: ToolCalls | None = None  # where the environment asks for them


class Environment(Protocol):
    """The members of every environment. One of the user's needs no base class.

    Four more are optional: `players`, the number of players, 1 without it; `tools`, the JSON schemas of the
    tools that the chat template names; `tool_calls`, in which form the model calls them ("json", "xml" or
    "template", see tool_calls.py); and `close()`.
    """

    def reset(self, problem: Problem, key: EnvironmentKey) -> Content | Observation:
        """Begin. Returns the prompt; as an Observation where another player than 0 moves first."""
        ...

    def step(self, ids: Sequence[int], text: str) -> Observation:
        """The answer to a turn.

        ids: the tokens as they were drawn, the stop token included. text: without the stop token, other
        special tokens by their names. A turn that was cut before its stop token ends the trajectory, and no
        environment sees it. Where the environment has `tool_calls`, a third argument is the ToolCalls of the
        turn.
        """
        ...


@runtime_checkable
class EnvironmentTask(Protocol):
    """A task whose problems are worked on in an environment."""

    chat: bool  # whether contents go through the tokenizer's chat template, if it has one

    def problems(self, split: str) -> Sequence[Problem]:
        """The problems of a split, as those of a Task."""
        ...

    def environment(self) -> Environment:
        """A new environment, for one trajectory or game."""
        ...


def checked_content(content: Any) -> Any:
    """The content, if it is a text, messages or ids, none of them too long, and valid Unicode.

    Raises ValueError.
    """
    kinds = {type(item) for item in content} if isinstance(content, list | tuple) else {str}
    if not (isinstance(content, str) or kinds <= {dict} or kinds <= {int}):
        raise ValueError(
            f"content ({shown(content)}) must be a string, a list of messages or a list of token ids"
        )
    if kinds == {dict}:
        wrong = next((m for m in content if type(m.get("role")) is not str), None)
        if wrong is not None:
            raise ValueError(f"message {shown(wrong)} must have a `role`")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    length = len(content) if kinds <= {int} else len(text)
    if length > LONGEST_CONTENT:
        what = "ids" if kinds <= {int} else "characters"
        raise ValueError(f"content of {length:,} {what} must have at most {LONGEST_CONTENT:,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"content is not valid Unicode: character {error.start:,} is {text[error.start]!r}, half of one"
        ) from None
    return content if isinstance(content, str) else list(content)
