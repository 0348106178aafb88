"""Environments of verifiers (https://github.com/PrimeIntellect-ai/verifiers), 0.4: its `verifiers.v1`.

    [task]
    name = "zerokl.integrations.environments.verifiers:Verifiers"
    options = { taskset = "my_taskset", train = 512, held_out = 64 }

A rollout of verifiers' own runs beside the trajectory: its environment asks for a turn, waits until the
model has drawn it, and gives the reward at its end (verifiers_agent.py). So a trajectory that zerokl ends
before, by its limits, has the reward 0.

One seat is played, by a chat loop that has no tools of its own, on this machine. What asks for more is
refused: several seats, tools (MCP servers), containers, pictures.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from ...engine.tasks.environment import EnvironmentKey, Observation
from ...engine.tasks.problem import Problem
from .seeded import OwnGenerators, check_installed


class VerifiersEnvironment:
    """One rollout of verifiers'."""

    def __init__(self, world: Any, tasks: Sequence[Any], chat: bool):
        self._world, self._tasks, self._chat = world, tasks, chat
        self._generators = OwnGenerators()
        self._messages: list[dict[str, str]] = []
        self._rollout: asyncio.Task[float] | None = None

    async def reset(self, problem: Problem, key: EnvironmentKey) -> Observation:
        """What the environment says before the model's first turn."""
        from .verifiers_agent import Turns, rollout

        self._generators.seed(key)
        self._turns = Turns()
        task = self._tasks[int(problem.answer)]
        with self._generators.installed():
            await self._world.start()
            self._rollout = asyncio.create_task(rollout(self._world, task, self._turns))
            return await self._next()

    async def step(self, ids: list[int], text: str) -> Observation:
        """What the environment says to a turn; at the end, the reward."""
        self._messages.append({"role": "assistant", "content": text})
        self._turns.answer(text)
        with self._generators.installed():
            return await self._next()

    async def close(self) -> None:
        """End a rollout that waits for a turn."""
        if self._rollout is not None and self._rollout.cancel():
            await asyncio.wait([self._rollout])

    async def _next(self) -> Observation:
        """Wait until the rollout asks for a turn, or has ended."""
        asked = asyncio.create_task(self._turns.asked())
        await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            return Observation(reward=self._rollout.result(), done=True)
        messages, known = asked.result(), len(self._messages)
        if messages[:known] != self._messages or len(messages) == known:
            raise ValueError(
                f"verifiers: message {known} does not go on with the conversation; a trajectory is one"
            )
        self._messages = messages
        return Observation(self._content(messages[known:]))

    def _content(self, messages: list[dict[str, str]]) -> Any:
        if self._chat:
            return messages
        text = "\n".join(message["content"] for message in messages)
        return f"\n{text}\n"


class Verifiers:
    """The tasks of a taskset of verifiers'.

    taskset: its id, a module that can be imported. environment: the id of an environment of verifiers',
    where the taskset's own is not meant. config: further settings, as the table `[env]` of verifiers has
    them. chat: whether messages go through the chat template. train: tasks at most; 0 is all of a taskset
    that ends. held_out: tasks after these.

    Raises ValueError where verifiers is not installed, and for a taskset with too few tasks or more seats.
    """

    def __init__(
        self,
        taskset: str = "",
        environment: str = "",
        config: Mapping[str, Any] | None = None,
        chat: bool = True,
        train: int = 0,
        held_out: int = 0,
    ):
        check_installed("verifiers", "verifiers", "pip install 'verifiers>=0.4,<0.5'")
        if not taskset:
            raise ValueError('task verifiers: needs a taskset; set task.options = { taskset = "my_taskset" }')
        from .verifiers_agent import World

        self.chat, self._world = chat, World(taskset, environment, config or {})
        if not train and not self._world.taskset.bounded:
            raise ValueError(f"task verifiers: taskset {taskset} does not end; set task.options.train")
        wanted = train + held_out if train else None
        self._tasks = list(islice(self._world.taskset, wanted))
        n = len(self._tasks) - held_out
        if n < max(train, 1):
            raise ValueError(
                f"task verifiers: taskset {taskset} has {len(self._tasks)} tasks, fewer than train ({train}) "
                f"and held_out ({held_out}) ask for"
            )
        parts = {"train": range(n), "held_out": range(n, len(self._tasks))}
        self._splits = {
            split: [Problem(i, self._name(place), str(place)) for i, place in enumerate(places)]
            for split, places in parts.items()
        }

    def problems(self, split: str) -> list[Problem]:
        return self._splits[split]

    def environment(self) -> VerifiersEnvironment:
        return VerifiersEnvironment(self._world, self._tasks, self.chat)

    def _name(self, place: int) -> str:
        """What people see of a task."""
        data = self._tasks[place].data
        return data.prompt_text or data.name or f"task {place}"
