"""Environments as a process of the executor plays them.

A call has the problem, the key and all turns so far, which decide its answer. A process that has played the
trajectory up to here goes on from there. Any other plays it again from its first turn, and says so where an
environment does not do the same again. So it decides nothing which process serves a call.

Nothing here loads torch or numpy (see processes/process.py), unless the task is one of the user's.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...files.reading import shown
from .environment import (
    LARGEST_REWARD,
    EnvironmentKey,
    EnvironmentTask,
    Observation,
    Turn,
    checked_content,
)
from .problem import Problem
from .tool_calls import FORMS
from .users_code import add_places, awaited, call_user


@dataclass
class _Session:
    environment: Any
    turns: int
    history: str  # hash of all that the environment has answered


class Sessions:
    """Of a problem, a key, the turns and the hash of the answers so far: the next answer, as JSON."""

    def __init__(self, task: EnvironmentTask):
        self._task = task
        self._sessions: dict[EnvironmentKey, _Session] = {}
        # Only asked what it is, so it is not closed.
        first = call_user("environment: the task's environment()", "", task.environment)
        self._players = getattr(first, "players", 1)
        if type(self._players) is not int or not 1 <= self._players <= 64:
            raise ValueError(f"environment: players ({self._players!r}) must be a number from 1 to 64")
        binary = getattr(task, "binary", False) is True
        self.about = {
            "players": self._players,
            "tools": _tools(first),
            "tool_calls": _form(first),
            "binary": binary,
        }

    def __call__(
        self,
        problem: Problem | None = None,
        key: EnvironmentKey | None = None,
        turns: Sequence[Turn] = (),
        history: str = "",
    ) -> dict[str, Any] | None:
        """Without a problem, end all sessions. Raises whatever the environment raises, and ValueError."""
        if problem is None or key is None:
            for open_key in list(self._sessions):
                self._end(open_key)
            return None
        try:
            session = self._sessions.get(key)
            if turns and (session is None or (session.turns, session.history) != (len(turns) - 1, history)):
                session = self._played(problem, key, turns[:-1], history)
            answer = self._step(session, turns[-1]) if turns else self._reset(problem, key)
        except BaseException:
            self._end(key)
            raise
        if answer["done"]:
            self._end(key)
        return answer

    def _end(self, key: EnvironmentKey) -> None:
        if (session := self._sessions.pop(key, None)) is not None:
            _close(session.environment)

    def _played(self, problem: Problem, key: EnvironmentKey, turns: Sequence[Turn], history: str) -> _Session:
        """The session after these turns, played from the first one."""
        self._reset(problem, key)
        session = self._sessions[key]
        for turn in turns:
            self._step(session, turn)
        if session.history != history:
            raise ValueError(
                "it was played again after a crash beside it and answered otherwise; what an environment "
                "does must follow from the problem, the key and the turns"
            )
        return session

    def _reset(self, problem: Problem, key: EnvironmentKey) -> dict[str, Any]:
        self._end(key)
        environment = self._task.environment()
        observation = awaited(environment.reset(problem, EnvironmentKey(*key)))
        if not isinstance(observation, Observation):
            observation = Observation(observation)
        session = self._sessions[key] = _Session(environment, -1, "")
        return self._noted(session, observation, "reset")

    def _step(self, session: _Session, turn: Turn) -> dict[str, Any]:
        calls = [] if turn.calls is None else [turn.calls]
        observation = awaited(session.environment.step(list(turn.ids), turn.text, *calls))
        if not isinstance(observation, Observation):
            raise ValueError(f"step returned {shown(observation)}, which is no Observation")
        return self._noted(session, observation, "step")

    def _noted(self, session: _Session, observation: Observation, what: str) -> dict[str, Any]:
        """The answer as JSON, after the session has taken note of it."""
        answer = {
            "content": checked_content(observation.content),
            "rewards": _rewards(observation.reward, self._players, what),
            "done": _checked(observation.done, bool, f"{what}: done"),
            "player": _checked(observation.player, int, f"{what}: player"),
        }
        if not 0 <= answer["player"] < self._players:
            raise ValueError(f"{what}: player ({answer['player']}) must lie in 0 to {self._players - 1}")
        session.turns += 1
        text = session.history + json.dumps(answer)
        session.history = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return answer | {"history": session.history}


def environment_function(task: str, options: Mapping[str, Any], directory: str) -> Sessions:
    """The environments of a task (see load_task). Raises ValueError."""
    # For good: this process exists for this task alone.
    add_places(directory)
    from .loading import load_task  # it loads numpy

    return Sessions(load_task(task, options, directory))


def _tools(environment: Any) -> list[dict[str, Any]] | None:
    """The tools of an environment, which are JSON schemas. Raises ValueError."""
    tools = getattr(environment, "tools", None)
    try:
        tools = json.loads(json.dumps(tools))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"environment: tools ({shown(tools)}) must be JSON ({error})") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"environment: tools ({shown(tools)}) must be a list of JSON schemas")
    return tools


def _form(environment: Any) -> str:
    """In which form the model calls the tools; empty where nobody asks. Raises ValueError."""
    form = getattr(environment, "tool_calls", "")
    if form not in ("", *FORMS):
        raise ValueError(f"environment: tool_calls ({shown(form)}) must be one of {', '.join(FORMS)}")
    return form


def _close(environment: Any) -> None:
    if (close := getattr(environment, "close", None)) is not None:
        awaited(close())


def _rewards(reward: Any, players: int, what: str) -> list[float]:
    """The reward of each player. 0 stands for 0 of each; a game has a number for each player otherwise."""
    is_number = isinstance(reward, int | float)
    rewards = [reward] * players if is_number and (players == 1 or reward == 0) else reward
    if not isinstance(rewards, list | tuple) or len(rewards) != players:
        raise ValueError(f"{what}: reward ({shown(reward)}) must be a number for each of {players} players")
    numbers = [float(r) for r in rewards]
    if not all(math.isfinite(r) and abs(r) <= LARGEST_REWARD for r in numbers):
        raise ValueError(f"{what}: reward ({shown(reward)}) must be finite and at most {LARGEST_REWARD:g}")
    return numbers


def _checked(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{what} ({shown(value)}) must be of type {kind.__name__}")
    return value
