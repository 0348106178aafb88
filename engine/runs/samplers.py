"""The sampler of a run, and the scorer of its rollouts when its weights are not the trainer's.

    shared      native, the default; vllm-zerokl; or, on a GPU, vllm-exact: over the trainer's own weights
    separate    any sampler over weights of its own: older ones (max_staleness; lagged.py), weights in another
                precision, or perturbed ones (rollout/perturb.py)
    pooled      native samplers of actors on any nodes (pool.engine; lagged.py)
    external    hf or vllm, which load the trainer's weights (external.py)

With max_staleness = N rollouts may be up to N versions old. A periodic sampler keeps its weights until they
would be more than N updates behind, and its rollouts name their version. So the sampler's decoder still has
the weights that were sampled from. Its workers score the rollouts with these weights by the trainer's
forward: these are the old policy's logprobs. In exact mode they are compared with the sampler's, and are
equal bit for bit. The difference between them and the trainer's current logprobs is then staleness alone. A
sampler that differs in more than age has a second copy of the weights beside it: the trainer's weights at the
sampler's version, in the trainer's precision.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ...model.checkpoint import DTYPES
from ...model.config import ModelConfig
from ...model.decoder import Decoder
from ...model.families import FAMILIES
from ...model.lora import Lora
from ...model.numerics import Numerics, named_numerics
from ..config.run_config import Config
from ..config.sampler_names import EXTERNAL
from ..config.section import settings_of
from ..display.terminal import console
from ..processes.shared_tensor import SharedTensor
from ..rollout.older_weights import OlderWeights
from ..rollout.perturb import Delayed, sampled_weights, trained_weights
from ..rollout.pool.actor import Blueprint, bits_environment
from ..rollout.pool.dispatch import Dispatcher
from ..rollout.pool.on_ray import RayCluster
from ..rollout.stopwatch import Stopwatch
from ..rollout.types import Sampler
from ..rollout.vllm.arguments import vllm_context
from ..rollout.vllm.exact import VllmExactSampler
from ..rollout.vllm.installed import is_cpu_build
from ..rollout.vllm.sampler import VllmZeroklSampler
from ..train.master_weights import SlicedWeights
from ..train.parallel.scorer import Scorer, WorkersSampler
from ..train.parallel.workers import ParallelSampler, Workers
from .external import ExternalSampler, make_engine
from .lagged import Drawing, DrawingSampler, LaggedSampler, PooledSampler


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
    weights: SlicedWeights,
    workers: Workers,
    micro_batch: int,
) -> Samplers:
    """The samplers that a configuration asks for. micro_batch: sequences of one pass of a scorer.

    Raises ValueError for an engine that is not installed.
    """
    shared = WorkersSampler(workers, micro_batch)
    if config.pool.engine:
        return _pooled(config, model_config, weights, workers, micro_batch, shared)
    run = _Run(config, model, model_config, weights)
    if is_separate(config):
        return _separate(run, workers, micro_batch, shared)
    if config.sampler in EXTERNAL:
        layout = weights.decoder.layout
        return Samplers(
            _external(run, lambda: sampled_weights(config, layout, weights.whole_model())), shared
        )
    if config.sampler == "native":
        return Samplers(shared, shared)
    vllm = _over_weights_of(workers, run)
    return Samplers(vllm, vllm)


def refuse_model(config: Config, model_config: ModelConfig) -> None:
    """Raise ValueError for a sampler, or a setting, that does not go with such a model."""
    if model_config.experts and config.sampler == "vllm" and is_cpu_build():
        # Its reload leaves packed copies of routers and experts as they were, or mixes them up. Measured with
        # 0.32: log-probabilities after a reload of the same weights were off by up to 15.
        raise ValueError(
            'sampler ("vllm"): vLLM on a CPU does not take new weights of a mixture of experts; set sampler '
            '= "vllm-zerokl", which is zerokl\'s decoder inside vLLM'
        )
    if model_config.states:
        refuse_states(config, model_config.architecture)
    elif config.precision.state_prompts != "each":
        raise ValueError(
            f'precision.state_prompts ("{config.precision.state_prompts}"): {model_config.architecture} has '
            'no layer with a state, so each prompt is read once in any case; set it to "each"'
        )
    if model_config.is_latent and config.sampler == "vllm-zerokl":
        raise ValueError(
            f'sampler ("vllm-zerokl"): {model_config.architecture}: vLLM plans a cache of latents for latent '
            'attention, and zerokl\'s decoder keeps whole keys and values; set sampler = "native"'
        )
    if not model_config.experts:
        _refuse_without_experts(config, model_config.architecture)


# Why a sampler does not draw from a model whose layers keep a state.
_NO_STATES = {
    "vllm": "its prefill and its decode compute a gated delta net in two ways",
    "vllm-exact": "vLLM's batch-invariant mode has no gated delta net, and its prefill and its decode "
    "compute one in two ways",
    "vllm-zerokl": "vLLM's cache manager has no place for the states of zerokl's decoder",
}


def refuse_states(config: Config, architecture: str) -> None:
    """Raise ValueError for a sampler that cannot draw from a model with gated delta nets."""
    if config.sampler in _NO_STATES:
        reason = _NO_STATES[config.sampler]
        raise ValueError(f'sampler ("{config.sampler}"): {architecture}: {reason}; set sampler = "native"')


class _Run(NamedTuple):
    """What an engine that draws is made from. model: the checkpoint's folder."""

    config: Config
    model: Path
    model_config: ModelConfig
    weights: SlicedWeights


def refuse_uncompared(architecture: str) -> None:
    """Raise ValueError for a family whose model in vLLM was not compared with ours."""
    if not FAMILIES[architecture].vllm_exact:
        compared = ", ".join(name for name, family in FAMILIES.items() if family.vllm_exact)
        raise ValueError(
            f"sampler \"vllm-exact\": nobody has compared vLLM's own {architecture} with the trainer's "
            f'operations; those of {compared} were. Set sampler = "vllm-zerokl"'
        )


def _over_weights_of(workers: Workers, run: _Run) -> Sampler:
    """The sampler that is not external, over the weights of these workers."""
    config, layout, flat = run.config, run.weights.decoder.layout, workers.host.decoder.flat
    if config.sampler == "vllm-zerokl":
        return VllmZeroklSampler(
            run.model,
            run.model_config,
            workers.weights or flat,
            config.vllm,
            workers.host.decoder.numerics,
            frozen=layout.frozen,
            value_head=layout.value_head,
            adapters=_unmerged(workers),
            stopwatch=workers.host.sampler.stopwatch,
        )
    if config.sampler == "vllm-exact":
        refuse_uncompared(run.model_config.architecture)
        return VllmExactSampler(run.model, run.model_config, layout, flat, config.vllm)
    return ParallelSampler(workers)


def _unmerged(workers: Workers) -> tuple[Lora, SharedTensor | torch.Tensor] | None:
    """The adapters of these workers that are not merged into their weights; None without such."""
    adapters = workers.host.adapters
    if adapters is None or adapters.layout.lora.merge:
        return None
    return adapters.layout.lora, workers.adapters or adapters.flat


def _external(run: _Run, weights: Callable[[], torch.Tensor]) -> ExternalSampler:
    """weights: gives those that the engine loads, [numel]."""
    decoder = run.weights.decoder
    engine = make_engine(run.config, run.model, run.model_config, decoder.device)
    return ExternalSampler(engine, run.model_config, decoder.layout, weights)


def _separate(run: _Run, workers: Workers, micro_batch: int, shared: WorkersSampler) -> Samplers:
    """The samplers of a run whose training rollouts are drawn with weights of the sampler's own.

    workers: the trainer's. shared: evaluates.
    """
    config, weights, n = run.config, run.weights, workers.n
    stopwatch = workers.host.sampler.stopwatch  # a step has one
    drawing = _drawing(run, n, stopwatch)
    if not config.max_staleness:
        return Samplers(SeparateSampler(config, drawing, weights), shared)
    scoring = drawing.workers
    if scoring is None or config.sampler_differs:
        scoring = _separate_workers(config, run.model_config, weights, n, sampler=False)
    scorer = Scorer(scoring, micro_batch)
    if config.lag is not None:
        older = OlderWeights(config.lag)
        lagged = LaggedSampler(config, weights, older, drawing, scoring)
        return Samplers(lagged, shared, scorer, older)
    return Samplers(SeparateSampler(config, drawing, weights, scoring), shared, scorer)


def _drawing(run: _Run, n: int, stopwatch: Stopwatch) -> Drawing:
    """The sampler of a run over weights of its own. n: of the native sampler's workers."""
    config, weights = run.config, run.weights
    if config.sampler in EXTERNAL:
        flat = sampled_weights(config, weights.decoder.layout, weights.whole_model()).clone()
        return Drawing(flat, _external(run, lambda: flat))
    workers = _separate_workers(config, run.model_config, weights, n, True, stopwatch)
    with ExitStack() as on_failure:
        on_failure.callback(workers.close)
        drawing = Drawing(workers.host.decoder.flat, _over_weights_of(workers, run), workers)
        on_failure.pop_all()
    return drawing


def _pooled(
    config: Config,
    model_config: ModelConfig,
    weights: SlicedWeights,
    workers: Workers,
    micro_batch: int,
    shared: WorkersSampler,
) -> Samplers:
    """The samplers of a run whose training rollouts are drawn by actors. shared: evaluates."""
    decoder, lag = weights.decoder, config.lag
    assert lag is not None
    dtype = DTYPES[config.precision.sampler_dtype or config.dtype]
    threads = max(1, int(config.pool.cpus))
    numerics = numerics_of(config, sampler=True)
    blueprint = Blueprint(decoder.layout, dtype, numerics, config.native, decoder.device.type, threads)

    def open_pool() -> Dispatcher:
        pool, environment = config.pool, bits_environment(decoder.device)
        cluster = RayCluster(pool, blueprint, lag + 2)
        return Dispatcher(cluster, pool.actors, pool.in_flight, pool.timeout_s, environment, console.print)

    scoring = _separate_workers(config, model_config, weights, workers.n, sampler=False) if lag else None
    older = OlderWeights(lag)
    sampler = PooledSampler(config, weights, older, scoring, config.sampler_differs, model_config, open_pool)
    return Samplers(sampler, shared, Scorer(scoring, micro_batch) if scoring else None, older)


def _refuse_without_experts(config: Config, architecture: str) -> None:
    """Raise ValueError for a setting that a model without experts cannot have."""
    for key, setting in settings_of(Config).items():
        if setting.facts.needs_experts and setting.is_set(config):
            value, usual = setting.value(config), setting.usual
            raise ValueError(f"{key} ({value!r}): {architecture} has no experts; set it to {usual!r}")


def is_separate(config: Config) -> bool:
    """Whether the weights that draw are not those of the trainer's current version, rounded to a dtype."""
    precision = config.sampler not in EXTERNAL and config.precision.sampler_differs
    return bool(config.max_staleness or config.perturb.any or precision)


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
    sampler_bytes = DTYPES[config.precision.sampler_dtype or config.dtype].itemsize
    in_engine = 0  # those that the engine itself holds
    if config.sampler in EXTERNAL or config.sampler == "vllm-exact":
        in_engine = sampler_bytes
    if config.sampler == "vllm-zerokl" and config.vllm.cuda_graphs:
        in_engine = sampler_bytes
    if not (is_separate(config) or config.pool.engine):
        return in_engine
    drawing = in_engine + (4 if config.sampler in EXTERNAL else sampler_bytes)
    if config.pool.engine or config.staleness_schedule == "lagged":
        return _lagged_weight_bytes(config, compute, sampler_bytes, drawing)
    delayed = 4 * (config.perturb.delay + 1) if config.perturb.delay else 0
    return drawing + delayed + (compute if config.max_staleness and config.sampler_differs else 0)


def _lagged_weight_bytes(config: Config, compute: int, sampler_bytes: int, drawing: int) -> int:
    """copied_weight_bytes where the sampler draws from older weights.

    compute, sampler_bytes: bytes of a weight of the trainer and of the sampler. drawing: of all copies of one
    version that a sampler of this process has.
    """
    assert config.lag is not None
    has_scored = bool(config.lag) and config.sampler_differs
    kept = (config.lag + 1) * (sampler_bytes + has_scored * compute)  # older_weights.py
    if config.pool.engine:
        return kept + bool(config.lag) * compute  # the scorer's
    return kept + drawing + has_scored * compute


def numerics_of(config: Config, sampler: bool = False) -> Numerics:
    """The numerics of the trainer or of the sampler; the tiles are those of both."""
    precision = config.precision.of_sampler if sampler else config.precision
    kv = (sampler and config.perturb.kv) or config.precision.kv
    return named_numerics(
        head_dtype=precision.head_dtype,
        cache_dtype=precision.cache_dtype,
        tiles=precision.tiles,
        router_dtype=precision.router_dtype,
        kv=kv,
        attention=precision.attention,
        leaves=precision.leaves,
        state_prompts=precision.state_prompts,
    )


def _separate_workers(
    config: Config,
    model_config: ModelConfig,
    weights: SlicedWeights,
    n: int,
    sampler: bool,
    stopwatch: Stopwatch | None = None,
) -> Workers:
    """Workers with a copy of the weights: the sampler's weights, or the trainer's."""
    master, layout = weights.whole_model(), weights.decoder.layout
    if sampler:
        dtype = DTYPES[config.precision.sampler_dtype or config.dtype]
        flat = sampled_weights(config, layout, master).to(dtype, copy=True)
    else:
        flat = trained_weights(config, layout, master)
    decoder = Decoder(model_config, flat, layout, numerics_of(config, sampler))
    share = sampler and shares_weights(config, flat.device)
    return Workers(decoder, config.virtual_shards, n, config.native, share, stopwatch=stopwatch)


def shares_weights(config: Config, device: torch.device) -> bool:
    """Whether the weights that draw lie where vLLM can map them, in whichever process it is."""
    return config.sampler == "vllm-zerokl" and device.type == "cpu"


class SeparateSampler(DrawingSampler):
    """A sampler over weights of its own.

    scoring: workers that need the trainer's weights at the sampler's version, if there are any. They are
    those of `drawing` where the sampler has these weights.
    """

    def __init__(
        self, config: Config, drawing: Drawing, weights: SlicedWeights, scoring: Workers | None = None
    ):
        super().__init__(drawing, config.perturb)
        self._config, self._scoring, self._weights = config, scoring, weights
        self._delayed = Delayed(config.perturb.delay)
        if config.perturb.delay:
            self._delayed.push(weights.whole_model())

    @torch.no_grad()
    def sync_weights(self, version: int) -> None:
        """They come from the master weights, and are renewed only when they would otherwise be too old."""
        flat, sampler, workers = self._drawing
        rewound = version < sampler.version  # steps are done again
        if rewound:
            self._delayed = Delayed(self._perturb.delay)
        too_old = rewound or version - sampler.version > self._config.max_staleness
        if not (too_old or self._perturb.delay):
            return
        master, layout = self._weights.whole_model(), self._weights.decoder.layout
        source = self._delayed.push(master) if self._perturb.delay else master
        if not too_old:
            return
        flat.copy_(sampled_weights(self._config, layout, source))
        if self._scoring not in (None, workers):
            self._scoring.host.decoder.flat.copy_(trained_weights(self._config, layout, master))
        sampler.sync_weights(version)
