"""The one who plays in an environment of verifiers': its turns are drawn by the trainer's model.

verifiers runs a harness, a program that asks a model, between its environment and the model. This harness is
a chat loop in this process. Its requests go through verifiers' own server, which notes each turn in the
rollout's trace, and from there to `Turns`, where they wait.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields, resolve_agent
from verifiers.v1.interception import Interception, InterceptionServer

# Settings of the seat that the model plays, where the user sets no others.
_SEAT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
_MODEL = "zerokl"


class World:
    """An environment of verifiers' with its taskset; and, once it has started, the server of its rollouts.

    Raises ValueError for an environment with several seats.
    """

    def __init__(self, taskset: str, environment: str, config: Mapping[str, Any]):
        raw = {"id": environment, **config, "taskset": {**config.get("taskset", {}), "id": taskset}}
        seats = [*agent_config_fields(vf.resolve_env_config(raw))]
        if len(seats) != 1:
            raise ValueError(f"task verifiers: {taskset} has the seats {', '.join(seats)}; it must have one")
        raw[seats[0]] = {**_SEAT, **config.get(seats[0], {})}
        self.env = vf.load_environment(vf.resolve_env_config(raw))
        self.taskset = self.env.taskset
        self.server: InterceptionServer | None = None

    async def start(self) -> None:
        """Start what all rollouts of this process share."""
        if self.server is None:
            self.server = InterceptionServer()
            await self.server.start()
            await self.env.start()


class Turns(vf.Client):
    """A model for verifiers, whose turns come from outside. One is asked for at a time."""

    def __init__(self):
        self._asked: asyncio.Queue[list[dict[str, str]]] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()

    async def asked(self) -> list[dict[str, str]]:
        """The conversation that the next turn continues."""
        return await self._asked.get()

    def answer(self, text: str) -> None:
        """Give the turn that was asked for."""
        self._answers.put_nowait(text)

    async def get_response(self, dialect: Any, body: dict[str, Any], *_: Any, **__: Any) -> vf.Response:
        """A turn, in the form of a chat completion. Raises ValueError for a request that asks for more."""
        if body.get("tools"):
            raise ValueError("verifiers: the request has tools, which this adapter does not give the model")
        self._asked.put_nowait([_plain(message) for message in body["messages"]])
        message = {"role": "assistant", "content": await self._answers.get()}
        raw = {
            "id": _MODEL,
            "object": "chat.completion",
            "created": 0,
            "model": _MODEL,
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


async def rollout(world: World, task: vf.Task, turns: Turns) -> float:
    """Play one rollout. Returns its reward.

    Raises ValueError where it fails, and where its environment plays several.
    """
    traces: list[vf.Trace] = []
    agents = vf.Agents(world.env.config, lambda _, seat: _Agent(seat, _Slot(world.server, turns), traces))
    await world.env.setup(agents)
    await world.env.run(task, agents)
    if len(traces) != 1:
        raise ValueError(f"verifiers: the environment played {len(traces)} rollouts; a trajectory is one")
    await world.env.finalize(task, vf.Episode(env=_about(world), task=traces[0].task, traces=traces))
    (trace,) = traces
    if not trace.ok:
        error = trace.last_error
        raise ValueError(f"verifiers: the rollout failed ({error.type}: {error.message})")
    return trace.reward


def _about(world: World) -> vf.EnvInfo:
    return vf.EnvInfo(id=world.env.config.env_id)


def _plain(message: Mapping[str, Any]) -> dict[str, str]:
    """Role and text of a message. Raises ValueError for one with anything else than texts."""
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    kinds = {part.get("type") for part in parts} - {"text"}
    if kinds:
        raise ValueError(f"verifiers: a message has content of type {', '.join(map(str, sorted(kinds)))}")
    return {"role": message["role"], "content": "".join(part["text"] for part in parts)}


class _Slot(Interception):
    """A rollout's place on the server of all; its requests go to its own turns."""

    def __init__(self, server: InterceptionServer, turns: Turns):
        super().__init__()
        self._server, self._turns = server, turns

    async def start(self) -> None:
        """The server has started."""

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[tuple[str, str, str]]:
        async with self._server.acquire(session) as slot:
            session.client = self._turns
            yield slot


class _Agent(vf.Agent):
    """A seat whose harness is the chat loop below, and whose finished rollouts are noted in `traces`."""

    def __init__(self, seat: vf.AgentConfig, slot: _Slot, traces: list[vf.Trace]):
        super().__init__(resolve_agent(seat, model=_MODEL), interception=slot)
        self.harness = _ChatLoop(self.config.harness)
        self._traces = traces

    async def run(self, task: vf.Task, **options: Any) -> vf.Trace:
        trace = await super().run(task, **options)
        self._traces.append(trace)
        return trace

    @asynccontextmanager
    async def interaction(self, task: vf.Task, **options: Any) -> AsyncIterator[vf.Interaction]:
        async with super().interaction(task, **options) as interaction:
            yield interaction
        self._traces.append(interaction.trace)


class _ChatLoop(vf.Harness[vf.HarnessConfig]):
    """Asks for one turn of a conversation."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in prompt or []]
        request = {
            "url": f"{endpoint}/chat/completions",
            "headers": {"Authorization": f"Bearer {secret}"},
            "json": {"model": ctx.model, "messages": messages},
        }
        no_limit = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=no_limit) as client, client.post(**request) as response:
            error = "" if response.ok else await response.text()
            return vf.ProgramResult(int(not response.ok), "", error)
