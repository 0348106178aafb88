"""Environments whose observations and actions are texts, with Gymnasium's reset and step.

GEM's (https://github.com/axon-rl/gem), 0.1:

    [task]
    name = "zerokl.integrations.environments.gym:Gym"
    options = { id = "game:GuessTheNumber-v0-easy" }

and Gymnasium's, with make = "gymnasium:make". `terminated` and `truncated` both end a trajectory as `done`;
its reward is the sum of the rewards of its steps.
"""

from collections.abc import Mapping
from typing import Any

from ...engine.tasks.environment import EnvironmentKey, Observation
from ...engine.tasks.problem import Problem
from ...engine.tasks.users_code import load_object
from .seeded import OwnGenerators, check_installed, seeded_problems


class GymEnvironment:
    """One episode."""

    def __init__(self, make: str, id: str, options: Mapping[str, Any], chat: bool):
        self._generators, self._line_end = OwnGenerators(), "" if chat else "\n"
        with self._generators.installed():
            self._world = load_object(make, "task gym: make", "")(id, **options)

    def reset(self, problem: Problem, key: EnvironmentKey) -> str:
        """The first observation."""
        with self._generators.installed():
            text, info = self._world.reset(seed=int(problem.answer))
        self._generators.seed(key)
        return self._content(text, info)

    def step(self, ids: list[int], text: str) -> Observation:
        """The next observation and its reward. What is no text is refused."""
        with self._generators.installed():
            answer, reward, terminated, truncated, info = self._world.step(text)
        done = bool(terminated or truncated)
        return Observation("" if done else self._content(answer, info), float(reward), done)

    def close(self) -> None:
        """Close the library's environment, if it can be closed."""
        getattr(self._world, "close", lambda: None)()

    def _content(self, text: Any, info: Mapping[str, Any]) -> str:
        """An observation, and what GEM asks for after it."""
        if not isinstance(text, str):
            raise ValueError(f"task gym: the observation is of type {type(text).__name__}; it must be a text")
        parts = [part for part in (text.rstrip("\n"), info.get("suffix", "")) if part]
        return self._line_end + "\n".join(parts) + self._line_end


class Gym:
    """An environment of a library with Gymnasium's interface, begun from seeds.

    id: its registered name. make: module:function that makes it. options: further arguments of make. chat:
    whether what is said goes through the chat template. train, held_out: numbers of seeds, counted from
    `seed`.

    Raises ValueError where the library is not installed, and for numbers out of range. An environment that it
    does not have is refused when the first one is made.
    """

    def __init__(
        self,
        id: str = "",
        make: str = "gem:make",
        options: Mapping[str, Any] | None = None,
        chat: bool = True,
        train: int = 512,
        held_out: int = 64,
        seed: int = 0,
    ):
        library = make.partition(":")[0]
        package = {"gem": "gem-llm==0.1.0"}.get(library, library)
        check_installed("gym", library, f"pip install {package}")
        if not id:
            raise ValueError(
                'task gym: needs an id; set task.options = { id = "game:GuessTheNumber-v0-easy" }'
            )
        self.chat, self._options = chat, (make, id, dict(options or {}), chat)
        self._splits = seeded_problems("gym", id, train, held_out, seed)

    def problems(self, split: str) -> list[Problem]:
        return self._splits[split]

    def environment(self) -> GymEnvironment:
        return GymEnvironment(*self._options)
