"""What trains in a run: policy, optimizer, workers and samplers; and how they are made of sharded weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ...kernels.leaves import Leaves
from ...kernels.low_rank import LowRankBuffers
from ...kernels.shared_experts import SharedExperts
from ...model.adapters import AdapterLayout, low_rank_by_weight
from ...model.checkpoint import DTYPES, read_weights
from ...model.config import ModelConfig
from ...model.decoder import Decoder
from ...model.numerics import Numerics
from ...model.shared_context import check_shared_rows
from ...model.weights import NONE_UNMERGED, Layout, UnmergedAdapters
from ..config.run_config import Config
from ..processes.allocator import return_freed_memory
from ..rollout.stopwatch import Stopwatch
from ..train.master_weights import AdapterWeights, MasterWeights
from ..train.optimizer import Optimizer
from ..train.parallel.cut import CutParts, CutWorkers
from ..train.parallel.data_parallel import RankedSampler, RankedScorer, RankedWorkers
from ..train.parallel.expert import ExpertParts
from ..train.parallel.gathered import FrozenPieces, WholeWeights
from ..train.parallel.gradient import TrainedAdapters
from ..train.parallel.process_group import Ranks
from ..train.parallel.scorer import Scorer, WorkersSampler, frozen
from ..train.parallel.sharded_adapters import AdapterGradient, ShardedAdapters, ShardedAdapterWorkers
from ..train.parallel.sharded_model import ShardedModel, ShardedWorkers
from ..train.parallel.spread import Cutting
from ..train.parallel.tensor import SharedScorer, TensorParts
from ..train.parallel.tensor_adapters import SharedAdapters
from ..train.parallel.ulysses import ContextParts
from ..train.parallel.workers import Workers
from ..train.parallel.zero import Slices
from ..train.sharded_weights import ShardedWeights
from ..train.tensor_weights import TensorAdapterWeights, TensorWeights
from .samplers import Samplers, numerics_of
from .trained import adapters_before


class Engine(NamedTuple):
    """What a run computes with, which becomes a part of its TrainState."""

    policy: Decoder
    optimizer: Optimizer
    parallel: Workers | RankedWorkers
    samplers: Samplers
    ref_policy: Scorer | RankedScorer | None = None
    critic: Scorer | RankedScorer | None = None


class EngineInputs(NamedTuple):
    """What an engine is made from. folder: of the model.

    own_layout, base: see adapter_layout (trained.py). ref_model: the folder and the configuration of the
    frozen reference; None without one.
    """

    config: Config
    folder: Path
    layout: Layout
    own_layout: AdapterLayout | None
    base: torch.dtype
    ranks: Ranks
    device: torch.device
    ref_model: tuple[Path, ModelConfig] | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""
        return DTYPES[self.config.dtype]

    @property
    def updates(self) -> int:
        """Of the whole run."""
        return self.config.steps * self.config.updates_per_rollout


def tensor_engine(run: EngineInputs, micro_batch: int, stopwatch: Stopwatch) -> Engine:
    """Ranks that share layers (tensor.py) and maybe rows (ulysses.py); or experts (expert.py)."""
    config, replicas = run.config, run.ranks.replicas
    weights, parts = read_weights(run.folder, run.layout), _parts_of(run, run.layout)
    policy = _shared_decoder(run, parts, weights, config.recompute == "layer")
    adapters, summed = None, parts
    if run.own_layout:
        before = adapters_before(config, run.own_layout)
        adapters = SharedAdapters(run.own_layout, before, weights, policy, run.base, parts)
        summed, slices = adapters.parts, Slices(run.own_layout, run.ranks, run.device)
        masters = TensorAdapterWeights(adapters, slices)
    else:
        masters = TensorWeights(policy, weights, parts)
    summed = _with_shared_rows(run, policy.config, summed)
    workers = Workers(
        policy,
        config.virtual_shards // run.ranks.data_parallel.size,
        1,
        config.native,
        stopwatch=stopwatch,
        adapters=adapters and adapters.trained,
        part=summed.part,
    )
    optimizer = Optimizer(masters, config.optimizer, run.updates)
    sampler = RankedSampler(WorkersSampler(workers, micro_batch), replicas)
    ref_policy = critic = None
    if run.ref_model is not None:
        folder, ref_config = run.ref_model
        ref_parts = _parts_of(run, Layout(ref_config))
        reference = _shared_decoder(run, ref_parts, read_weights(folder, ref_parts.layout))
        shared = SharedScorer(Workers(reference, config.virtual_shards), micro_batch, ref_parts)
        ref_policy = RankedScorer(shared, replicas)
    if config.loss.has_critic:
        critic = RankedScorer(Scorer(workers, micro_batch), replicas)
    parallel = CutWorkers(workers, summed, config.virtual_shards)
    return Engine(policy, optimizer, parallel, Samplers(sampler, sampler), ref_policy, critic)


def _parts_of(run: EngineInputs, layout: Layout) -> TensorParts:
    parts = ExpertParts if run.config.parallel.expert > 1 else TensorParts
    return parts(layout, run.ranks, run.device)


def _with_shared_rows(run: EngineInputs, config: ModelConfig, summed: CutParts) -> CutParts:
    """The parts of a gradient that ranks sum, where they share the rows of a forward, too.

    config: of what a rank computes with. summed: the parts without shared rows. Raises ValueError (see
    check_shared_rows).
    """
    if run.config.parallel.context == 1:
        return summed
    return ContextParts(config, summed.cutting, run.ranks, run.device)


def _shared_decoder(
    run: EngineInputs, parts: TensorParts, weights: torch.Tensor, recompute: bool = False
) -> Decoder:
    """A decoder over this rank's part of `weights`."""
    flat = parts.cut(weights).to(run.device, run.dtype)
    return Decoder(parts.part.config, flat, parts.part, _numerics(run), recompute)


def _numerics(run: EngineInputs) -> Numerics:
    """Those of the run, with the ranks that share leaves or experts."""
    numerics, ranks = numerics_of(run.config), run.ranks
    leaves = Leaves(numerics.leaves.count, ranks.tensor_parallel)
    return numerics._replace(leaves=leaves, shared_experts=SharedExperts(ranks.expert_parallel))


def sharded_engine(run: EngineInputs, micro_batch: int, stopwatch: Stopwatch) -> Engine:
    """Weights that FSDP shards (parallel/sharded_model.py). Whoever draws or scores gathers them for a call.

    Ranks that share layers gather their part of the weights.

    Raises ValueError for a process without a process group.
    """
    config, ranks = run.config, run.ranks
    if ranks.mesh is None:
        raise ValueError(
            'config: parallel.engine ("fsdp") needs a process group, which only `zerokl train` makes'
        )
    masters, parallel, whole = _of_adapters(run) if run.own_layout else _of_weights(run)
    policy = whole.decoder
    optimizer = Optimizer(masters, config.optimizer, run.updates)
    # One worker: the sampler's. It is asked for no gradient.
    drawing = Workers(policy, config.virtual_shards, 1, config.native, stopwatch=stopwatch)
    return_freed_memory()
    sampler = RankedSampler(WorkersSampler(drawing, micro_batch), ranks.replicas, whole)
    ref_policy = critic = None
    if run.ref_model is not None:
        ref_policy = _reference(run, *run.ref_model, micro_batch)
    if config.loss.has_critic:
        critic = RankedScorer(Scorer(drawing, micro_batch), ranks.replicas, whole)
    return Engine(policy, optimizer, parallel, Samplers(sampler, sampler), ref_policy, critic)


def _of_weights(run: EngineInputs) -> tuple[MasterWeights, RankedWorkers, WholeWeights]:
    """What trains the weights."""
    parts, cutting = _cut(run, run.layout)
    if run.config.parallel.context > 1:
        check_shared_rows(cutting.part.config, cutting.part.trained, run.config.parallel.context)
    model = _sharded_model(run, cutting)
    whole = WholeWeights(model.gather_into, _empty_decoder(run, cutting), parts and parts.model)
    return ShardedWeights(model, whole), ShardedWorkers(model, run.config.virtual_shards), whole


def _of_adapters(run: EngineInputs) -> tuple[MasterWeights, RankedWorkers, WholeWeights]:
    """What trains LoRA's adapters."""
    flat = adapters_before(run.config, run.own_layout).to(run.device, copy=True)
    adapters = TrainedAdapters(run.own_layout, flat)
    gradient, slices = AdapterGradient(adapters), Slices(run.own_layout, run.ranks, run.device)
    uncut, unmerged = Cutting.uncut(run.layout), NONE_UNMERGED
    decoder = _empty_decoder(run, uncut)
    if not run.own_layout.lora.merge:
        unmerged = low_rank_by_weight(*adapters)
        decoder.adapt(unmerged)
    model = _sharded_model(run, uncut, gradient.buffers, unmerged)
    whole = WholeWeights(model.gather_into, decoder)
    spread = ShardedAdapters(adapters, model, decoder, run.base)
    parallel = ShardedAdapterWorkers(model, gradient, slices, run.config.virtual_shards)
    return AdapterWeights(spread, slices, whole), parallel, whole


def _cut(run: EngineInputs, layout: Layout) -> tuple[TensorParts | None, Cutting]:
    """How ranks share the layers of a model; None and uncut where they do not."""
    if run.config.parallel.tensor == 1:
        return None, Cutting.uncut(layout)
    parts = TensorParts(layout, run.ranks, run.device)
    return parts, parts.cutting


def _sharded_model(
    run: EngineInputs,
    cutting: Cutting,
    adapters: Mapping[str, LowRankBuffers] | None = None,
    unmerged: UnmergedAdapters = NONE_UNMERGED,
) -> ShardedModel:
    return ShardedModel(
        run.folder,
        cutting,
        dtype=run.dtype,
        numerics=_numerics(run),
        recompute=run.config.recompute == "layer",
        ranks=run.ranks,
        device=run.device,
        adapters=adapters or {},
        unmerged=unmerged,
    )


def _reference(run: EngineInputs, folder: Path, ref_config: ModelConfig, micro_batch: int) -> RankedScorer:
    """The frozen reference, of which each rank keeps its pieces."""
    parts, cutting = _cut(run, Layout(ref_config))
    pieces = FrozenPieces(folder, cutting, run.dtype, run.ranks, run.device)
    whole = WholeWeights(pieces.gather_into, _empty_decoder(run, cutting), parts and parts.model)
    scorer = frozen(whole.decoder, run.config.virtual_shards, 1, micro_batch)
    return RankedScorer(scorer, run.ranks.replicas, whole)


def _empty_decoder(run: EngineInputs, cutting: Cutting) -> Decoder:
    """A decoder for WholeWeights."""
    layout = cutting.part
    flat = torch.zeros(layout.numel, dtype=run.dtype, device=run.device)
    return Decoder(layout.config, flat, layout, _numerics(run))
