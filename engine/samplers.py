"""Which sampler a run draws with, and what scores its rollouts when its weights are not the trainer's.

shared    the native sampler, vLLM with our decoder, or (on a GPU) vLLM's own model, over the trainer's own weights: the default
apart     the native sampler over weights of its own: older ones (max_staleness), of another precision, or disturbed (mismatch.py)
foreign   transformers or stock vLLM (audit/hf.py, audit/stock.py)

Rollouts up to N versions old: the sampler keeps its weights until they would be more than N updates behind, and its rollouts name their
version. The weights sampled from are therefore still there, in the sampler's decoder, and its workers score the rollouts with them by the
trainer's forward: the old policy's logprobs. In exact mode those are the sampler's, bit for bit (that is compared), and what remains
between them and the trainer's logprobs now is staleness alone. A sampler that differs in more than age has a second copy beside it,
with the weights and in the precision of the trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from ..kernels.philox import philox
from ..kernels.tiles import minor_version
from ..model.checkpoint import DTYPES
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from .config import Config
from .learner import Learner
from .mismatch import Delayed
from .native import check_prompts
from .rollout import Keys, Rollout, Sampler, Sampling
from .scorer import Scorer
from .vllm.sampler import VllmSampler, is_cpu_build, require_vllm
from .workers import ParallelSampler, Workers


@dataclass(frozen=True)
class Samplers:
    """What draws the training rollouts, what evaluates the trainer's policy, and what scores rollouts of older weights."""

    training: Sampler
    evaluation: Sampler
    behaviour: Scorer | None = None


def make_samplers(config: Config, model: Path, model_config: ModelConfig, learner: Learner, workers: Workers) -> Samplers:
    """The samplers a configuration asks for. Raises ValueError for an engine that is not installed."""
    own = ParallelSampler(workers)
    if config.sampler == "vllm":
        flat = workers.host.decoder.flat
        vllm = VllmSampler(model, model_config, workers.weights or flat, config.vllm, config.precision.numerics())
        return Samplers(vllm, vllm)
    if config.sampler == "vllm-stock" and config.exact:
        from .vllm.stock import StockSampler

        stock = StockSampler(model, model_config, learner.layout, workers.host.decoder.flat, config.vllm)
        return Samplers(stock, stock)
    if config.sampler in ("hf", "vllm-stock"):
        return Samplers(ForeignSampler(_engine(config, model, model_config, learner.decoder.device), model_config, learner), own)
    if not (config.max_staleness or config.mismatch.any or config.precision.sampler_differs):
        return Samplers(own, own)
    apart = ApartSampler(config, _workers(config, model_config, learner, workers.n, sampler=True), learner)
    if not config.max_staleness:
        return Samplers(apart, own)
    if config.mismatch.any or config.precision.sampler_differs:
        apart.trainer = _workers(config, model_config, learner, workers.n, sampler=False)
    return Samplers(apart, own, Scorer(apart.trainer or apart.workers, config.micro_batch))


def check_device(config: Config, device: str) -> None:
    """Raise ValueError where the sampler does not work on "cpu" or "cuda", the run's device, with the reason."""
    if not config.sampler.startswith("vllm"):
        return
    if config.sampler == "vllm-stock" and config.exact and device == "cpu":
        raise ValueError(
            'sampler ("vllm-stock") with exact = true needs a GPU: vLLM\'s kernels for CPUs are not batch-invariant; '
            'set exact = false, or sampler = "vllm"'
        )
    if device == "cuda" and is_cpu_build():
        raise ValueError(f'sampler ("{config.sampler}"): the vLLM installed here computes on CPUs only; set device = "cpu"')
    if device == "cuda" and config.vllm.multiprocess and (config.exact or config.sampler == "vllm"):
        raise ValueError(
            "vllm.multiprocess (true): on a GPU vLLM reads the trainer's own tensors, which are this process's; set it to false"
        )
    if config.sampler == "vllm-stock" and config.exact:
        version, tiles = require_vllm(), config.precision.tiles
        if minor_version(version) != minor_version(tiles):
            raise ValueError(f'precision.tiles ("{tiles}"): vLLM {version} is installed, and has other tiles; set it to that version')


def _workers(config: Config, model_config: ModelConfig, learner: Learner, n: int, sampler: bool) -> Workers:
    """Workers with a copy of the weights: the sampler's, or as the trainer has them."""
    dtype = DTYPES[(sampler and config.precision.sampler_dtype) or config.dtype]
    master = learner.whole_master()
    flat = (config.mismatch.weights(master) if sampler else master).to(dtype, copy=True)
    decoder = Decoder(model_config, flat, learner.layout, config.precision.numerics(sampler))
    return Workers(decoder, config.virtual_shards, n, config.native)


class ApartSampler:
    """The native sampler over weights of its own."""

    def __init__(self, config: Config, workers: Workers, learner: Learner):
        self.workers, self._learner, self._mismatch, self._max_staleness = workers, learner, config.mismatch, config.max_staleness
        self._sampler, self._delayed = ParallelSampler(workers), Delayed(config.mismatch.delay)
        if config.mismatch.delay:
            self._delayed.push(learner.whole_master())
        self.trainer: Workers | None = None  # with the weights that a trainer had at the sampler's version, where the sampler's differ

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """See Sampler. Taken from the master weights, and only when those sampled from would otherwise be too old."""
        back = version < self._sampler.version  # a run that is done again
        if back:
            self._delayed = Delayed(self._mismatch.delay)
        renew = back or version - self._sampler.version > self._max_staleness
        if not (renew or self._mismatch.delay):
            return
        master = self._learner.whole_master()
        source = self._delayed.push(master) if self._mismatch.delay else master
        if not renew:
            return
        self.workers.host.decoder.flat.copy_(self._mismatch.weights(source))
        if self.trainer is not None:
            self.trainer.host.decoder.flat.copy_(master)
        self._sampler.version = version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, keys: Keys) -> list[Rollout]:
        """See Sampler."""
        distribution = sampling.distribution
        if self._mismatch.temperature:
            distribution = distribution._replace(temperature=self._mismatch.temperature)
        return self._sampler.generate(prompts, replace(sampling, distribution=distribution, logit_noise=self._mismatch.logit_noise), keys)

    def close(self) -> None:
        """End its workers."""
        self.workers.close()


class _Engine(Protocol):
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Rollout]: ...

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None: ...


class ForeignSampler:
    """An engine that is not ours. Its tokens are drawn with its own random numbers, from a seed of the run's keys."""

    def __init__(self, engine: _Engine, config: ModelConfig, learner: Learner):
        self._engine, self._config, self._learner, self.version = engine, config, learner, 0
        self._load()

    def _load(self) -> None:
        self._engine.load_weights(self._learner.layout.checkpoint_views(self._learner.whole_master()))

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """See Sampler. The engine takes the master weights, rounded to its dtype."""
        self._load()
        self.version = version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, keys: Keys) -> list[Rollout]:
        """See Sampler."""
        check_prompts(prompts, sampling, self._config.max_positions, self._config.vocab_size)
        seed = int(philox([(keys.first_prompt, keys.step, int(keys.stream), 0)], (keys.seed, int(keys.stream)))[0, 0])
        every = [ids for ids in prompts for _ in range(sampling.samples)]
        drawn = self._engine.generate(every, sampling, seed)
        G = sampling.samples
        return [replace(r, prompt=keys.first_prompt + i // G, sample=i % G, weight_version=self.version) for i, r in enumerate(drawn)]

    def close(self) -> None:
        """Nothing runs outside this process."""


def _engine(config: Config, model: Path, model_config: ModelConfig, device: torch.device) -> _Engine:
    dtype = DTYPES[config.precision.sampler_dtype or config.dtype]
    if config.sampler == "hf":
        from .audit.hf import HfEngine

        return HfEngine(model, dtype, device=device)
    from .audit.stock import VllmEngine

    return VllmEngine(model, dtype, config.vllm.context or model_config.max_positions)
