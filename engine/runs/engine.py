"""What trains in a run: policy, optimizer, workers and samplers; and how they are made of sharded weights."""

from pathlib import Path
from typing import NamedTuple

import torch

from ...model.checkpoint import DTYPES
from ...model.decoder import Decoder
from ...model.weights import Layout
from ..config import Config
from ..parallel.data_parallel import RankedSampler, RankedScorer, RankedWorkers
from ..parallel.process_group import Ranks
from ..parallel.scorer import Scorer, WorkersSampler
from ..parallel.sharded_model import GatheredSampler, ShardedModel, ShardedWorkers, WholeWeights
from ..parallel.workers import Workers
from ..stopwatch import Stopwatch
from ..train.optimizer import Optimizer
from ..train.sharded_optimizer import ShardedOptimizer
from .samplers import Samplers, numerics_of


class Engine(NamedTuple):
    """See TrainState."""

    policy: Decoder
    optimizer: Optimizer
    parallel: Workers | RankedWorkers | ShardedWorkers
    samplers: Samplers
    ref_policy: Scorer | RankedScorer | None = None
    critic: Scorer | RankedScorer | None = None


def sharded_engine(
    config: Config,
    folder: Path,
    layout: Layout,
    ranks: Ranks,
    device: torch.device,
    micro_batch: int,
    stopwatch: Stopwatch,
) -> Engine:
    """Weights that FSDP shards (parallel/sharded_model.py). The policy is whole only while it draws.

    Raises ValueError for a model of experts, and for a process without a process group.
    """
    if layout.config.experts:
        raise ValueError(
            f'config: parallel.engine ("fsdp"): {layout.config.architecture} has experts, which are not '
            'built with sharded weights; set parallel.engine = "replicated"'
        )
    if ranks.mesh is None:
        raise ValueError(
            'config: parallel.engine ("fsdp") needs a process group, which only `zerokl train` makes'
        )
    dtype, numerics = DTYPES[config.dtype], numerics_of(config)
    recompute = config.recompute == "layer"
    model = ShardedModel(folder, layout, dtype, numerics, recompute, ranks, device)
    policy = Decoder(layout.config, torch.zeros(layout.numel, dtype=dtype, device=device), layout, numerics)
    # One worker: the sampler's. It is asked for no gradient.
    drawing = Workers(policy, config.virtual_shards, 1, config.native, stopwatch=stopwatch)
    whole = WholeWeights(model, policy)
    updates = config.steps * config.updates_per_rollout
    optimizer = ShardedOptimizer(model, policy, whole, config.optimizer, updates)
    sampler = RankedSampler(GatheredSampler(WorkersSampler(drawing, micro_batch), whole), ranks)
    parallel = ShardedWorkers(model, config.virtual_shards)
    return Engine(policy, optimizer, parallel, Samplers(sampler, sampler))
