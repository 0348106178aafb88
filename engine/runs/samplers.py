"""The sampler of a run, and the scorer of its rollouts when its weights are not the trainer's.

    shared      native, the default; vllm-zerokl; or, on a GPU, vllm-exact: over the trainer's own weights
    separate    the native sampler over weights of its own: older ones (max_staleness; lagged.py), weights in
                another precision, or perturbed ones (perturb.py)
    pooled      native samplers of actors on any nodes (pool.engine; lagged.py)
    external    hf or vllm (rollout/hf.py, rollout/vllm/generator.py)

With max_staleness = N rollouts may be up to N versions old. A periodic sampler keeps its weights until they
would be more than N updates behind, and its rollouts name their version. So the sampler's decoder still has
the weights that were sampled from. Its workers score the rollouts with these weights by the trainer's
forward: these are the old policy's logprobs. In exact mode they are compared with the sampler's, and are
equal bit for bit. The difference between them and the trainer's current logprobs is then staleness alone. A
sampler that differs in more than age has a second copy of the weights beside it: the trainer's weights at the
sampler's version, in the trainer's precision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ...kernels.philox import philox
from ...model.checkpoint import DTYPES
from ...model.config import ModelConfig
from ...model.decoder import Decoder
from ...model.numerics import Numerics, named_numerics
from ..config import Config
from ..display.terminal import console
from ..parallel.scorer import Scorer, WorkersSampler
from ..parallel.workers import ParallelSampler, Workers
from ..perturb import Delayed, perturbed_weights
from ..rollout.hf import HfGenerator
from ..rollout.older_weights import OlderWeights
from ..rollout.pool.actor import Blueprint, bits_environment
from ..rollout.pool.dispatch import Dispatcher
from ..rollout.pool.on_ray import RayCluster
from ..rollout.types import (
    Completion,
    DrawParams,
    GenerationParams,
    Request,
    Rollout,
    Sampler,
    check_requests,
)
from ..rollout.vllm.arguments import vllm_context
from ..rollout.vllm.exact import VllmExactSampler
from ..rollout.vllm.generator import VllmGenerator
from ..rollout.vllm.installed import is_cpu_build
from ..rollout.vllm.sampler import VllmZeroklSampler
from ..sampler_names import EXTERNAL
from ..stopwatch import Stopwatch
from ..train.optimizer import Optimizer
from .lagged import LaggedSampler, PooledSampler, perturbed


@dataclass(frozen=True)
class Samplers:
    """The samplers of a run, and its scorer of the old policy."""

    training: Sampler  # draws the training rollouts
    evaluation: Sampler  # draws from the trainer's policy
    old_policy: Scorer | None = None  # scores rollouts of older weights; None where there are none
    older: OlderWeights | None = None  # what a lagged sampler draws with; None where there is none


def make_samplers(
    config: Config,
    model: Path,
    model_config: ModelConfig,
    optimizer: Optimizer,
    workers: Workers,
    micro_batch: int,
) -> Samplers:
    """The samplers that a configuration asks for. micro_batch: sequences of one pass of a scorer.

    Raises ValueError for an engine that is not installed, or that does not draw from such a model.
    """
    if model_config.experts and config.sampler == "vllm" and is_cpu_build():
        # Its reload leaves packed copies of routers and experts as they were, or mixes them up. Measured with
        # 0.32: log-probabilities after a reload of the same weights were off by up to 15.
        raise ValueError(
            'sampler ("vllm"): vLLM on a CPU does not take new weights of a mixture of experts; set sampler '
            '= "vllm-zerokl", which is zerokl\'s decoder inside vLLM'
        )
    if not model_config.experts:
        _refuse_without_experts(config, model_config.architecture)
    shared = WorkersSampler(workers, micro_batch)
    flat = workers.host.decoder.flat
    if config.sampler == "vllm-zerokl":
        vllm = VllmZeroklSampler(
            model,
            model_config,
            workers.weights or flat,
            config.vllm,
            numerics_of(config),
            frozen=optimizer.decoder.layout.frozen,
            value_head=optimizer.decoder.layout.value_head,
        )
        return Samplers(vllm, vllm)
    if config.sampler == "vllm-exact":
        own_model = VllmExactSampler(model, model_config, optimizer.decoder.layout, flat, config.vllm)
        return Samplers(own_model, own_model)
    if config.sampler in EXTERNAL:
        engine = _engine(config, model, model_config, optimizer.decoder.device)
        return Samplers(ExternalSampler(engine, model_config, optimizer), shared)
    if config.pool.engine:
        return _pooled(config, model_config, optimizer, workers, micro_batch, shared)
    if not is_separate(config):
        return Samplers(shared, shared)
    stopwatch = workers.host.sampler.stopwatch  # a step has one
    sampling = _separate_workers(config, model_config, optimizer, workers.n, True, stopwatch)
    if not config.max_staleness:
        return Samplers(SeparateSampler(config, sampling, optimizer), shared)
    scoring = sampling
    if _differs(config):
        scoring = _separate_workers(config, model_config, optimizer, workers.n, sampler=False)
    scorer = Scorer(scoring, micro_batch)
    if config.lag is not None:
        older = OlderWeights(config.lag)
        lagged = LaggedSampler(config, optimizer, older, sampling, scoring)
        return Samplers(lagged, shared, scorer, older)
    return Samplers(SeparateSampler(config, sampling, optimizer, scoring), shared, scorer)


def _pooled(
    config: Config,
    model_config: ModelConfig,
    optimizer: Optimizer,
    workers: Workers,
    micro_batch: int,
    shared: WorkersSampler,
) -> Samplers:
    """The samplers of a run whose training rollouts are drawn by actors. shared: evaluates."""
    decoder, lag = optimizer.decoder, config.lag
    assert lag is not None
    dtype = DTYPES[config.precision.sampler_dtype or config.dtype]
    threads = max(1, int(config.pool.cpus))
    numerics = numerics_of(config, sampler=True)
    blueprint = Blueprint(decoder.layout, dtype, numerics, config.native, decoder.device.type, threads)

    def open_pool() -> Dispatcher:
        pool, environment = config.pool, bits_environment(decoder.device)
        cluster = RayCluster(pool, blueprint, lag + 2)
        return Dispatcher(cluster, pool.actors, pool.in_flight, pool.timeout_s, environment, console.print)

    scoring = _separate_workers(config, model_config, optimizer, workers.n, sampler=False) if lag else None
    older = OlderWeights(lag)
    sampler = PooledSampler(config, optimizer, older, scoring, _differs(config), model_config, open_pool)
    return Samplers(sampler, shared, Scorer(scoring, micro_batch) if scoring else None, older)


def _refuse_without_experts(config: Config, architecture: str) -> None:
    """Raise ValueError for a setting that a model without experts cannot have."""
    precision = config.precision
    defaults = {
        "perturb.routing": (config.perturb.routing, "free"),
        "loss.router_aux_coef": (config.loss.resolve().router_aux_coef, 0.0),
        "precision.router_dtype": (precision.router_dtype, "compute"),
        "precision.sampler_router_dtype": (precision.sampler_router_dtype, ""),
    }
    for name, (value, default) in defaults.items():
        if value != default:
            raise ValueError(f"{name} ({value!r}): {architecture} has no experts; set it to {default!r}")


def is_separate(config: Config) -> bool:
    """Whether the native sampler has weights of its own."""
    return config.sampler == "native" and bool(config.max_staleness or _differs(config))


def _differs(config: Config) -> bool:
    """Whether the native sampler differs from the trainer in more than the age of its weights."""
    return config.perturb.any or config.precision.sampler_differs


def sampling_context(config: Config, model_config: ModelConfig) -> int:
    """The tokens of the longest sequence that the sampler takes."""
    if config.sampler in ("vllm-zerokl", "vllm-exact"):
        return vllm_context(model_config, config.vllm)
    return (config.sampler == "vllm" and config.vllm.context) or model_config.max_positions


def copied_weight_bytes(config: Config) -> int:
    """Bytes of the copies of each weight that the sampler, and the scorer of the old policy, have on a GPU.

    They are beside those of the trainer.
    """
    compute = DTYPES[config.dtype].itemsize
    of_sampler = DTYPES[config.precision.sampler_dtype or config.dtype].itemsize
    if config.sampler in EXTERNAL:
        return of_sampler
    if config.sampler == "vllm-exact" or (config.sampler == "vllm-zerokl" and config.vllm.cuda_graphs):
        return compute
    if not (is_separate(config) or config.pool.engine):
        return 0
    if config.pool.engine or config.staleness_schedule == "lagged":
        return _lagged_weight_bytes(config, compute, of_sampler)
    delayed = 4 * (config.perturb.delay + 1) if config.perturb.delay else 0
    return of_sampler + delayed + (compute if config.max_staleness and _differs(config) else 0)


def _lagged_weight_bytes(config: Config, compute: int, of_sampler: int) -> int:
    """See copied_weight_bytes. compute, of_sampler: bytes of a weight of the trainer and of the sampler."""
    assert config.lag is not None
    has_scored = bool(config.lag) and _differs(config)
    kept = (config.lag + 1) * (of_sampler + has_scored * compute)  # older_weights.py
    if config.pool.engine:
        return kept + bool(config.lag) * compute  # the scorer's
    return kept + of_sampler + has_scored * compute


def numerics_of(config: Config, sampler: bool = False) -> Numerics:
    """The dtypes of lm_head, cache and router, of the trainer or of the sampler, and the tiles of both."""
    precision = config.precision.of_sampler if sampler else config.precision
    return named_numerics(
        precision.head_dtype, precision.cache_dtype, precision.tiles, precision.router_dtype
    )


def _separate_workers(
    config: Config,
    model_config: ModelConfig,
    optimizer: Optimizer,
    n: int,
    sampler: bool,
    stopwatch: Stopwatch | None = None,
) -> Workers:
    """Workers with a copy of the weights: the sampler's weights, or the trainer's."""
    dtype = DTYPES[(sampler and config.precision.sampler_dtype) or config.dtype]
    master = optimizer.whole_model()
    flat = (perturbed_weights(config.perturb, master) if sampler else master).to(dtype, copy=True)
    decoder = Decoder(model_config, flat, optimizer.decoder.layout, numerics_of(config, sampler))
    return Workers(decoder, config.virtual_shards, n, config.native, stopwatch=stopwatch)


class SeparateSampler:
    """The native sampler over weights of its own.

    scoring: workers that need the trainer's weights at the sampler's version, if there are any. They are
    `workers` themselves where the sampler has these weights.
    """

    def __init__(
        self, config: Config, workers: Workers, optimizer: Optimizer, scoring: Workers | None = None
    ):
        self.workers, self._scoring, self._optimizer = workers, scoring, optimizer
        self._perturb, self._max_staleness = config.perturb, config.max_staleness
        self._sampler, self._delayed = ParallelSampler(workers), Delayed(config.perturb.delay)
        if config.perturb.delay:
            self._delayed.push(optimizer.whole_model())

    @property
    def samples_at_once(self) -> int:
        return self._sampler.samples_at_once

    @torch.no_grad()
    def sync_weights(self, version: int) -> None:
        """See Sampler.

        The weights come from the master weights. They are renewed only when they would otherwise be too old.
        """
        rewound = version < self._sampler.version  # steps are done again
        if rewound:
            self._delayed = Delayed(self._perturb.delay)
        too_old = rewound or version - self._sampler.version > self._max_staleness
        if not (too_old or self._perturb.delay):
            return
        master = self._optimizer.whole_model()
        source = self._delayed.push(master) if self._perturb.delay else master
        if not too_old:
            return
        self.workers.host.decoder.flat.copy_(perturbed_weights(self._perturb, source))
        if self._scoring not in (None, self.workers):
            self._scoring.host.decoder.flat.copy_(master)
        self._sampler.sync_weights(version)

    def end_turns(self) -> None:
        """See Sampler."""
        self._sampler.end_turns()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self._sampler.generate([perturbed(self._perturb, request) for request in requests])

    def close(self) -> None:
        """End the workers of this sampler."""
        self.workers.close()


class _Engine(Protocol):
    def generate(
        self, prompts: Sequence[Sequence[int]], generation_params: GenerationParams, seed: int
    ) -> list[Rollout]: ...

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None: ...


class ExternalSampler:
    """A sampler over an engine that is not ours.

    The engine draws tokens with its own random numbers. Their seed is made from the run's rng_key.
    """

    samples_at_once = None  # see Sampler

    def __init__(self, engine: _Engine, config: ModelConfig, optimizer: Optimizer):
        self._engine, self._config, self._optimizer, self.version = engine, config, optimizer, 0
        self._load()

    def _load(self) -> None:
        layout = self._optimizer.decoder.layout
        self._engine.load_weights(layout.checkpoint_views(self._optimizer.whole_model()))

    def sync_weights(self, version: int) -> None:
        """See Sampler. The engine gets the master weights, rounded to its dtype."""
        self._load()
        self.version = version

    def end_turns(self) -> None:
        """Do nothing: the engine keeps nothing between two calls."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        check_requests(requests, self._config.max_positions, self._config.vocab_size)
        if not requests:
            return []
        # An engine that is not ours has one setting for all that it draws together.
        kinds: dict[tuple[DrawParams, int], list[int]] = {}
        for i, request in enumerate(requests):
            kinds.setdefault((request.draw_params, request.max_tokens), []).append(i)
        completions: dict[int, Completion] = {}
        for (draw_params, max_tokens), places in kinds.items():
            drawn = self._draw([requests[i] for i in places], draw_params, max_tokens)
            completions |= dict(zip(places, drawn, strict=True))
        return [completions[i] for i in range(len(requests))]

    def _draw(
        self, requests: Sequence[Request], draw_params: DrawParams, max_tokens: int
    ) -> list[Completion]:
        """The completions of requests of one kind."""
        key = requests[0].rng_key
        counter = [(key.prompt, key.step, key.sample, requests[0].drawn)]
        seed = int(philox(counter, (key.seed, int(key.stream)))[0, 0])
        params = GenerationParams(
            draw_params.sampling_params, 1, max_tokens, draw_params.stop_ids, draw_params.experts
        )
        rollouts = self._engine.generate([request.ids for request in requests], params, seed)
        return [Completion(r.completion_ids, r.logprobs, r.finish, self.version, r.experts) for r in rollouts]

    def close(self) -> None:
        """Do nothing: nothing runs outside this process."""


def _engine(config: Config, model: Path, model_config: ModelConfig, device: torch.device) -> _Engine:
    dtype = DTYPES[config.precision.sampler_dtype or config.dtype]
    if config.sampler == "hf":
        return HfGenerator(model, dtype, device=device)
    context = config.vllm.context or model_config.max_positions
    return VllmGenerator(model, dtype, context, experts=model_config.experts)
