"""A run's Triton kernels are compiled by all cores while its weights are loaded. It changes no bit.

A kernel is compiled at its first launch, one after another: the first step of a process with an empty cache
would wait for each. So some micro-batches of a step are gone through with tensors that have no memory. This
gives the launches. Threads compile their binaries into Triton's cache, where the step finds them. What is not
among them is compiled at its first launch, as ever.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...kernels.launch import Launch, kind_of, recorded_launches
from ...kernels.tiles import tiles_of_target
from ...model.adapters import low_rank_by_weight
from ...model.decoder import Decoder
from ...verify.binaries import compile_launch
from ..rollout.native import NativeSampler
from ..rollout.types import GenerationParams, RngKey, Rollout, complete
from ..train.losses.advantage import of_tokens
from ..train.parallel.gradient import ShardSum, TrainedAdapters
from ..train.parallel.process_group import Ranks
from ..train.shard import Shard, ShardWork
from .memory import PassSizes, RunShape
from .samplers import numerics_of

# Tokens of a completion that is drawn. Each goes through all layers, and launches the same binaries.
_DRAWN = 2


def _is_host(device: torch.device | None) -> bool:
    return device is not None and torch.device(device).type == "cpu"


class NoMemory(TorchDispatchMode):
    """Lets work go on with tensors of the meta device: what the host copies from them is zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and _is_host(kwargs.get("device")):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


def launches_of_a_step(shape: RunShape, sizes: PassSizes, target: str) -> list[Launch]:
    """A launch for each binary of a step's draw, forward and backward, on a target of verify/binaries.py.

    The step has whole weights in one process.
    """
    config, layout = shape.config, shape.layout
    flat = torch.zeros(layout.numel, dtype=shape.dtype, device="meta")
    recompute = config.recompute == "layer"
    decoder, adapters = Decoder(layout.config, flat, layout, numerics_of(config), recompute), None
    if shape.adapters:
        adapters = TrainedAdapters(shape.adapters, torch.zeros(shape.adapters.numel, device="meta"))
        if not shape.adapters.lora.merge:
            decoder.adapt(low_rank_by_weight(*adapters))
    with tiles_of_target(target), recorded_launches() as launches, NoMemory():
        if config.sampler == "native":
            _draw(decoder, shape)
        _train(decoder, adapters, shape, sizes)
    return list({kind_of(*launch): launch for launch in launches}.values())


def _draw(decoder: Decoder, shape: RunShape) -> None:
    """One prompt for each completion that is drawn at once."""
    config = shape.config
    sampler = NativeSampler(decoder, config.native.max_concurrency, config.native.max_batch_tokens)
    group = config.num_generations
    prompts = -(-config.native.max_concurrency // group)
    params = GenerationParams(config.sampling.sampling_params, group, _DRAWN, frozenset())
    complete(sampler, [[0] * max(1, shape.prompt_tokens)] * prompts, params, RngKey(config.seed, 0))


def _train(decoder: Decoder, adapters: TrainedAdapters | None, shape: RunShape, sizes: PassSizes) -> None:
    """As many virtual shards as are in flight, of two micro-batches each at most: others launch no more."""
    config = shape.config
    sums = ShardSum(decoder, sizes.shards_in_flight, sizes.shards_in_flight, adapters)
    params, directory = config.sampling.sampling_params, config.task.directory
    work = ShardWork(params, config.loss, sizes.micro_batch, directory)
    n = min(shape.sequences_of_a_shard, 2 * sizes.micro_batch)
    for advantage in (1.0, 0.0):  # with a gradient, and without one
        sums.add(work, [_shard(shape, i, n, advantage) for i in range(sizes.shards_in_flight)])


def _shard(shape: RunShape, index: int, n: int, advantage: float) -> Shard:
    prompt_ids = [0] * max(1, shape.prompt_tokens)
    ids, logprobs = [0] * shape.max_tokens, np.zeros(shape.max_tokens, np.float32)
    rollouts = [
        Rollout.of_one_turn((index * n + i) // shape.group, i, prompt_ids, ids, logprobs, "length", 0)
        for i in range(n)
    ]
    return Shard(rollouts, of_tokens(np.full(n, advantage), [len(ids)] * n), np.ones(n))


def compile_launches(launches: Sequence[Launch], target: str, threads: int) -> None:
    """Put the binaries of launches into Triton's cache. LLVM and ptxas hold no lock of Python's."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda launch: compile_launch(*launch, target), launches))


@contextmanager
def compiled_ahead(shape: RunShape, sizes: PassSizes, device: torch.device, ranks: Ranks) -> Iterator[None]:
    """Inside this context threads compile a GPU's kernels, each rank a part of them; its end waits for them.

    It does nothing on a CPU, on AMD's GPUs, and with fsdp, which launches otherwise.
    """
    if device.type != "cuda" or torch.version.hip or shape.config.parallel.engine == "fsdp":
        yield
        return
    target = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    # Not in a thread: who loads a model may change torch's default dtype, which all threads share.
    launches = launches_of_a_step(shape, sizes, target)[ranks.rank :: ranks.size]
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(compile_launches, launches, target, len(os.sched_getaffinity(0)))
        yield
        compiling.result()
