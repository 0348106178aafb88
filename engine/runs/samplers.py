"""Which sampler a run draws with, and what scores its rollouts when its weights are not the trainer's.

shared    the native sampler, vLLM with our decoder, or (on a GPU) vLLM's own model, over the trainer's own weights: the default
separate  the native sampler over weights of its own: older ones (max_staleness), of another precision, or perturbed (perturb.py)
external  transformers or stock vLLM (rollout/hf.py, rollout/vllm_stock.py)

Rollouts up to N versions old: the sampler keeps its weights until they would be more than N updates behind,
and its rollouts name their version. The weights sampled from are therefore still there, in the sampler's
decoder, and its workers score the rollouts with them by the trainer's forward: the old policy's logprobs. In
exact mode those are the sampler's, bit for bit (that is compared), and what remains between them and the
trainer's logprobs now is staleness alone. A sampler that differs in more than age has a second copy beside
it, with the weights and in the precision of the trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from ...kernels.philox import philox
from ...model.checkpoint import DTYPES
from ...model.config import ModelConfig
from ...model.decoder import Decoder, Numerics, named_numerics
from ..config import Config
from ..train.optimizer import Optimizer
from ..perturb import Delayed, perturbed_weights
from ..rollout.hf import HfEngine
from ..rollout.native import check_prompts
from ..rollout.types import RngKey, Rollout, Sampler, GenerationParams
from ..parallel.scorer import Scorer
from ..rollout.vllm.sampler import VllmSampler
from ..rollout.vllm.stock import StockSampler
from ..rollout.vllm_stock import VllmEngine
from ..rollout.vllm.installed import is_cpu_build, require_vllm
from ..parallel.workers import ParallelSampler, Workers


@dataclass(frozen=True)
class Samplers:
    """What draws the training rollouts, what evaluates the trainer's policy, and what scores rollouts of
    older weights.
    """

    training: Sampler
    evaluation: Sampler
    old_policy: Scorer | None = None


def make_samplers(config: Config, model: Path, model_config: ModelConfig, optimizer: Optimizer, workers: Workers) -> Samplers:
    """The samplers a configuration asks for. Raises ValueError for an engine that is not installed."""
    shared = ParallelSampler(workers)
    if config.sampler == "vllm":
        flat = workers.host.decoder.flat
        vllm = VllmSampler(model, model_config, workers.weights or flat, config.vllm, numerics_of(config))
        return Samplers(vllm, vllm)
    if config.sampler == "vllm-stock" and config.exact:
        stock = StockSampler(model, model_config, optimizer.layout, workers.host.decoder.flat, config.vllm)
        return Samplers(stock, stock)
    if config.sampler in ("hf", "vllm-stock"):
        return Samplers(ExternalSampler(_engine(config, model, model_config, optimizer.decoder.device), model_config, optimizer), shared)
    if not (config.max_staleness or config.perturb.any or config.precision.sampler_differs):
        return Samplers(shared, shared)
    separate = SeparateSampler(config, _workers(config, model_config, optimizer, workers.n, sampler=True), optimizer)
    if not config.max_staleness:
        return Samplers(separate, shared)
    if config.perturb.any or config.precision.sampler_differs:
        separate.trainer = _workers(config, model_config, optimizer, workers.n, sampler=False)
    return Samplers(separate, shared, Scorer(separate.trainer or separate.workers, config.micro_batch))


def numerics_of(config: Config, sampler: bool = False) -> Numerics:
    """Head and cache of the trainer, or of the sampler."""
    precision = config.precision.of_sampler if sampler else config.precision
    return named_numerics(precision.head_dtype, precision.cache_dtype)


def _workers(config: Config, model_config: ModelConfig, optimizer: Optimizer, n: int, sampler: bool) -> Workers:
    """Workers with a copy of the weights: the sampler's, or as the trainer has them."""
    dtype = DTYPES[(sampler and config.precision.sampler_dtype) or config.dtype]
    master = optimizer.whole_master()
    flat = (perturbed_weights(config.perturb, master) if sampler else master).to(dtype, copy=True)
    decoder = Decoder(model_config, flat, optimizer.layout, numerics_of(config, sampler))
    return Workers(decoder, config.virtual_shards, n, config.native)


class SeparateSampler:
    """The native sampler over weights of its own."""

    def __init__(self, config: Config, workers: Workers, optimizer: Optimizer):
        self.workers, self._optimizer, self._perturb, self._max_staleness = workers, optimizer, config.perturb, config.max_staleness
        self._sampler, self._delayed = ParallelSampler(workers), Delayed(config.perturb.delay)
        if config.perturb.delay:
            self._delayed.push(optimizer.whole_master())
        self.trainer: Workers | None = None  # with the weights that a trainer had at the sampler's version, where the sampler's differ

    @torch.no_grad()
    def sync_weights(self, version: int) -> None:
        """See Sampler.

        Taken from the master weights, and only when those sampled from would otherwise be too old.
        """
        back = version < self._sampler.version  # a run that is done again
        if back:
            self._delayed = Delayed(self._perturb.delay)
        renew = back or version - self._sampler.version > self._max_staleness
        if not (renew or self._perturb.delay):
            return
        master = self._optimizer.whole_master()
        source = self._delayed.push(master) if self._perturb.delay else master
        if not renew:
            return
        self.workers.host.decoder.flat.copy_(perturbed_weights(self._perturb, source))
        if self.trainer is not None:
            self.trainer.host.decoder.flat.copy_(master)
        self._sampler.version = version

    def generate(self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, rng_key: RngKey) -> list[Rollout]:
        """See Sampler."""
        sampling_params = generation_params.sampling_params
        if self._perturb.temperature:
            sampling_params = sampling_params._replace(temperature=self._perturb.temperature)
        return self._sampler.generate(prompts, replace(generation_params, sampling_params=sampling_params, logit_noise=self._perturb.logit_noise), rng_key)

    def close(self) -> None:
        """End its workers."""
        self.workers.close()


class _Engine(Protocol):
    def generate(self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seed: int) -> list[Rollout]: ...

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None: ...


class ExternalSampler:
    """An engine that is not ours.

    Its tokens are drawn with its own random numbers, from a seed of the run's rng_key.
    """

    def __init__(self, engine: _Engine, config: ModelConfig, optimizer: Optimizer):
        self._engine, self._config, self._optimizer, self.version = engine, config, optimizer, 0
        self._load()

    def _load(self) -> None:
        self._engine.load_weights(self._optimizer.layout.checkpoint_views(self._optimizer.whole_master()))

    def sync_weights(self, version: int) -> None:
        """See Sampler. The engine takes the master weights, rounded to its dtype."""
        self._load()
        self.version = version

    def generate(self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, rng_key: RngKey) -> list[Rollout]:
        """See Sampler."""
        check_prompts(prompts, generation_params, self._config.max_positions, self._config.vocab_size)
        seed = int(philox([(rng_key.first_prompt, rng_key.step, int(rng_key.stream), 0)], (rng_key.seed, int(rng_key.stream)))[0, 0])
        every = [ids for ids in prompts for _ in range(generation_params.num_generations)]
        drawn = self._engine.generate(every, generation_params, seed)
        G = generation_params.num_generations
        return [replace(r, prompt=rng_key.first_prompt + i // G, sample=i % G, weight_version=self.version) for i, r in enumerate(drawn)]

    def close(self) -> None:
        """Nothing runs outside this process."""


def _engine(config: Config, model: Path, model_config: ModelConfig, device: torch.device) -> _Engine:
    dtype = DTYPES[config.precision.sampler_dtype or config.dtype]
    if config.sampler == "hf":
        return HfEngine(model, dtype, device=device)
    return VllmEngine(model, dtype, config.vllm.context or model_config.max_positions)
