"""The rollout `zerokl` of verl: servers that draw with zerokl's native sampler (see exact_verl.py).

Each rank of the actor has one server, a Ray actor on the same node. verl's agent loops send it token ids, and
it sends token ids and log-probabilities back. After an update, the rank sends it all weights by Ray, and the
server rounds them to the compute dtype as FSDP does.

The random numbers of a completion depend on rollout.seed, on the step, on verl's request id, on the length of
the prompt, and on how often the step had this id and prompt before. With rollout.full_determinism=true the
ids are the same in each run, and main_ppo gives all samples of a prompt one id. Otherwise they are random.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any, NamedTuple

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.device import get_device_name, get_platform
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout import base as rollouts
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from ..engine.rollout.native import NativeSampler
from ..engine.rollout.types import Completion, DrawParams, Request, RngKey, check_requests
from ..engine.tasks.tokenizer import Tokenizer
from ..kernels.philox import Stream
from ..kernels.sampling_params import PENALTIES, SamplingParams, refuse_penalties
from ..model.checkpoint import load_decoder, resolve_model

# Requests that arrive within this time of each other are drawn together. It decides no bit.
_GATHER_S = 0.02
# Bytes of weights that one message to a server holds, about.
_MESSAGE_BYTES = 1 << 28


class _Waiting(NamedTuple):
    """A request, and where its completion goes."""

    request: Request
    future: asyncio.Future


class ExactServer:
    """Draws for the agent loops of verl. verl calls its methods by Ray.

    config: verl's RolloutConfig, checked by `check_config`. model: the folder that the actor reads.
    """

    def __init__(self, config: Any, model: str):
        folder, device = resolve_model(model), torch.device(get_device_name())
        self._config = config
        self._decoder = load_decoder(folder, PrecisionType.to_dtype(config.dtype), device)
        self._stop_ids = Tokenizer(folder, self._decoder.config.vocab_size).stop_ids
        self._sampler = NativeSampler(self._decoder, config.max_num_seqs)
        self._views = self._decoder.layout.checkpoint_views(self._decoder.flat.detach())
        self._missing = set(self._views)
        self._waiting: list[_Waiting] = []
        self._drawing: asyncio.Task | None = None
        self._step = 0
        self._seen: Counter[tuple[str, tuple[int, ...]]] = Counter()  # requests of this step

    async def ready(self) -> bool:
        """Whether the model is read."""
        return True

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **others: Any
    ) -> TokenOutput:
        """Raises ValueError for what the native sampler does not draw from."""
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ValueError(f"exact_verl: {given[0]} is refused: the kernels read text only")
        request = self._request(list(prompt_ids), dict(sampling_params), request_id)
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(self._draw())
        completion: Completion = await waiting.future
        return TokenOutput(
            token_ids=list(completion.ids),
            log_probs=completion.logprobs.tolist(),
            stop_reason="completed",
            extra_fields={"global_steps": completion.weight_version},
        )

    async def receive(self, weights: dict[str, torch.Tensor]) -> None:
        """Some tensors of a checkpoint, by name. Nothing may be drawn before `use` follows."""
        if self._waiting:
            raise RuntimeError("exact_verl: weights came while completions were being drawn")
        with torch.no_grad():
            for name in weights.keys() & self._views.keys():
                self._views[name].copy_(weights[name])
                self._missing.discard(name)

    async def use(self, step: int | None) -> None:
        """Draw with the weights that were received. Raises ValueError where some have not come."""
        if self._missing:
            raise ValueError(
                f"exact_verl: {sorted(self._missing)[0]} has not come; {len(self._missing)} tensors lack"
            )
        self._missing = set(self._views)
        self._step = self._step + 1 if step is None else step
        self._seen.clear()
        self._sampler.sync_weights(self._step)

    async def nothing(self, *_: Any, **__: Any) -> None:
        """Sleeping, waking and clearing: the native sampler keeps nothing between two calls."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    resume_generation = start_profile = stop_profile = nothing

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Wait until all is drawn: requests are not cut."""
        if self._drawing is not None:
            await self._drawing

    async def _draw(self) -> None:
        """Draw all that wait, those that arrive together in one call."""
        before = -1
        while self._waiting:
            while before != len(self._waiting):
                before = len(self._waiting)
                await asyncio.sleep(_GATHER_S)
            batch, before = list(self._waiting), -1
            try:
                completions = await asyncio.to_thread(
                    self._sampler.generate, [waiting.request for waiting in batch]
                )
            except Exception as error:  # goes to whoever asked
                for waiting in batch:
                    waiting.future.set_exception(error)
            else:
                for waiting, completion in zip(batch, completions, strict=True):
                    waiting.future.set_result(completion)
            del self._waiting[: len(batch)]

    def _request(self, ids: list[int], params: dict[str, Any], request_id: str) -> Request:
        config = self._config
        params.pop("logprobs", None)
        room = min(config.response_length, config.prompt_length + config.response_length - len(ids))
        most = min(params.pop("max_tokens", params.pop("max_new_tokens", room)), room)
        stop_ids = self._stop_ids | set(params.pop("stop_token_ids", None) or ())
        penalties = {name: params.pop(name) for name in PENALTIES if name in params}
        refuse_penalties("exact_verl", penalties)
        params["top_k"] = max(0, params.get("top_k") or 0)
        unknown = params.keys() - SamplingParams._fields
        if unknown:
            raise ValueError(f"exact_verl: {min(unknown)} is refused: the native sampler does not know it")
        drawn_from = DrawParams(SamplingParams.of(**params), frozenset(stop_ids))
        same = request_id, tuple(ids)
        key = request_key(config.seed, self._step, request_id, len(ids), self._seen[same])
        request = Request(tuple(ids), key, drawn_from, most)
        # Here, so that a request which cannot be drawn fails alone.
        check_requests([request], self._decoder.config.max_positions, self._decoder.config.vocab_size)
        self._seen[same] += 1
        return request


def request_key(seed: int, step: int, request_id: str, tokens: int, repeat: int) -> RngKey:
    """The key of a request; verl names a completion by its id only. tokens: of the prompt; turns differ.

    repeat: how many requests of the step had this id and prompt before. Two requests of a step have equal
    keys with a probability of 2 to the power of -62.
    """
    digest = hashlib.sha256(f"{request_id} {tokens} {repeat}".encode()).digest()
    prompt, sample = (int.from_bytes(digest[i : i + 4], "big") >> 1 for i in (0, 4))
    return RngKey(seed, step, Stream.SAMPLE, prompt, sample)


class ExactRollout(rollouts.BaseRollout):
    """The rank's side of a server: it sends the weights."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        check_config(self.config)
        self.replica_rank = device_mesh.get_rank() if replica_rank < 0 else replica_rank

    async def resume(self, tags: list[str]) -> None:
        """The server keeps its weights, and no cache between two calls."""

    async def release(self) -> None:
        """Nothing is given up, for the reason that `resume` gives."""

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Raises ValueError for adapters and for weights as differences."""
        if peft_config is not None or wire_format != "named_tensors":
            raise ValueError(
                "exact_verl: adapters and weights as differences are refused; send whole weights"
            )
        server = ray.get_actor(server_name(self.replica_rank))
        message: dict[str, torch.Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):
            message[name] = tensor.detach().cpu()
            if sum(x.nbytes for x in message.values()) >= _MESSAGE_BYTES:
                await server.receive.remote(message)
                message = {}
        await server.receive.remote(message)
        await server.use.remote(global_steps)


class ExactReplica(RolloutReplica):
    """Starts the server of a rank."""

    async def launch_servers(self) -> None:
        """Start it on the node of the rank, with a share of the rank's GPU where there is one."""
        check_config(self.config)
        (worker,) = self.workers
        node, devices = await worker.__ray_call__.remote(_place)
        platform = get_platform()
        variables = {name: "1" for name in platform.ray_noset_envvars()} | platform.rollout_env_vars()
        if devices:
            variables[platform.visible_devices_envvar()] = ",".join(devices)
        server = ray.remote(ExactServer).options(
            name=server_name(self.replica_rank),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": variables},
            max_concurrency=self.max_concurrency,
        )
        self._server_handle = server.remote(self.config, self.model_config.path)
        self._server_address = server_name(self.replica_rank)
        self.servers = [self._server_handle]
        await self._server_handle.ready.remote()


def _place(_: Any) -> tuple[str, list[str]]:
    """The node of the actor that runs this, and the devices that Ray has given it."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids().get(get_platform().ray_resource_name(), [])


def server_name(replica_rank: int) -> str:
    """The name of a server among Ray's actors."""
    return f"zerokl_server_{replica_rank}"


def check_config(config: Any) -> None:
    """Raise ValueError for a setting of the rollout that the server does not draw with, by name."""
    needed = {
        "tensor_model_parallel_size": (1, "one rank has one server"),
        "data_parallel_size": (1, "one rank has one server"),
        "pipeline_model_parallel_size": (1, "one rank has one server"),
        "top_p": (1.0, "verl's actor scores over the whole vocabulary"),
        "repetition_penalty": (1.0, "the actor scores without it"),
        "ignore_eos": (False, "a completion ends with an end-of-sequence token"),
        "quantization": (None, "the kernels compute in fp32, bf16 or fp16"),
        "calculate_log_probs": (True, "without them nothing is compared"),
    }
    for name, (value, reason) in needed.items():
        given = getattr(config, name)
        if given != value:
            raise ValueError(f"exact_verl: rollout.{name} ({given!r}) must be {value!r}: {reason}")
    if config.top_k not in (-1, 0):
        raise ValueError(f"exact_verl: rollout.top_k ({config.top_k}) must be -1: {needed['top_p'][1]}")
    if config.checkpoint_engine.backend != "naive":
        raise ValueError(
            f"exact_verl: rollout.checkpoint_engine.backend ({config.checkpoint_engine.backend!r}) must be "
            "'naive': weights are sent between two generations"
        )
