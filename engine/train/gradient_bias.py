"""The gradient's bias: that of the sampler's rollouts, under each correction, against exact ones.

Exact rollouts are drawn from the trainer's policy by the run's own evaluator, for the prompts of the step,
with random numbers of their own. Everything after them is the run's: rewards, advantages, loss, the tree of
the sum. So the measurement decides no bit of the run. verify/bias_figures.py has the figures.

It costs two sets of rollouts, and a forward and backward for each of them and for each loss of MEASURED. It
holds three gradients in the host's memory, 12 bytes a weight; with ranks, a rank holds its part.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ...kernels.philox import Stream
from ...verify.bias_figures import figures_of_step, floor_of_step
from ..config.loss_section import LossConfig
from ..rollout.types import RngKey, Sampler
from .collect import collect_step
from .losses.corrected import corrected
from .parallel.inner_products import WHOLE, inner_products
from .prepare import prepare
from .shard import Shard, ShardWork
from .state import TrainState

# The figures of a layer; those of the whole model are metrics, and have more.
OF_LAYERS = ("cosine", "distance")
# The name, among the losses, of the floors.
FLOOR = "floor"


@dataclass(frozen=True)
class StepBias:
    """What a step measures; nothing where it is not due.

    notes: gradient/layers, layer -> loss or FLOOR -> figure of OF_LAYERS -> value. seconds: that it took,
    which are none of the step's.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.metrics.get("time/gradient_s", 0.0)


def step_bias(state: TrainState, sampled: Shard) -> StepBias:
    """Measure the bias of a step's gradient before its first update, where monitor.gradient asks for it.

    sampled: what the step trains on. Raises ValueError as collect_step does.
    """
    interval, began_s = state.config.monitor.gradient, time.perf_counter()
    if not interval or state.step % interval:
        return StepBias()
    with state.stopwatch.apart():
        metrics, layers = _measured(state, sampled)
    metrics["time/gradient_s"] = time.perf_counter() - began_s
    return StepBias(metrics, {"gradient/layers": layers})


def _measured(state: TrainState, sampled: Shard) -> tuple[dict[str, float], dict[str, Any]]:
    """The metrics, and the layers (see StepBias)."""
    keys = [RngKey(state.config.seed, 2 * state.step + i, Stream.GRADIENT_EXACT) for i in (0, 1)]
    exact = [exact_gradient(state, key) for key in keys]
    floors: dict[str, dict[str, float]] = {}
    losses: dict[str, dict[str, dict[str, float]]] = {}
    for name, products in loss_products(state, measured_losses(state), [sampled], exact):
        losses[name] = {layer: figures_of_step(x) for layer, x in products.items()}
        floors = {layer: floor_of_step(x[1:, 1:]) for layer, x in products.items()}
    return _metrics(losses, floors[WHOLE]), _of_layers(losses, floors)


def _metrics(losses: dict[str, dict[str, dict[str, float]]], floor: dict[str, float]) -> dict[str, float]:
    """The metrics of the whole model: gradient/FIGURE_LOSS. floor: of the whole model."""
    metrics = {f"gradient/{figure}_floor": floor[figure] for figure in OF_LAYERS}
    metrics |= {f"gradient/{figure}_exact": floor[figure] for figure in ("inner", "norm")}
    for name, by_layer in losses.items():
        metrics |= {f"gradient/{figure}_{name}": x for figure, x in by_layer[WHOLE].items()}
    return metrics


def _of_layers(
    losses: dict[str, dict[str, dict[str, float]]], floors: dict[str, dict[str, float]]
) -> dict[str, dict[str, dict[str, float]]]:
    """The figures of each layer beside their floor, as StepBias.notes holds them."""
    by_loss = {FLOOR: floors} | losses
    return {
        layer: {name: {f: figures[layer][f] for f in OF_LAYERS} for name, figures in by_loss.items()}
        for layer in floors
        if layer != WHOLE
    }


def measured_losses(state: TrainState) -> dict[str, LossConfig]:
    """The losses that are compared; see corrected.py."""
    return corrected(state.config.loss)


def loss_products(
    state: TrainState,
    losses: Mapping[str, LossConfig],
    sampled: Sequence[Shard],
    exact: Sequence[torch.Tensor],
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """For each loss the inner products of its gradients, m of `sampled`, and of the n exact ones.

    -> (name, layer -> [m + n, m + n]). A loss that equals an earlier one is computed once.
    """
    done: dict[str, dict[str, np.ndarray]] = {}
    slices = state.optimizer.slices
    with state.parallel.own_threads():
        exact_products = inner_products(exact, slices)
    for name, loss in losses.items():
        key = loss.model_dump_json(exclude={"preset"})
        if key not in done:
            gradients = [gradient(state, shard, loss) for shard in sampled]
            with state.parallel.own_threads():
                products = inner_products(gradients, slices, exact)
            done[key] = {layer: _all_products(x, exact_products[layer]) for layer, x in products.items()}
        yield name, done[key]


def _all_products(sampled_products: np.ndarray, exact_products: np.ndarray) -> np.ndarray:
    """The products of m + n gradients, [m + n, m + n]: of the first m [m, m + n], of the rest [n, n]."""
    m = len(sampled_products)
    return np.block([[sampled_products], [sampled_products[:, m:].T, exact_products]])


def exact_gradient(state: TrainState, rng_key: RngKey) -> torch.Tensor:
    """The gradient from rollouts of the trainer's policy, drawn with this key; see `gradient`.

    Where all ratios are 1 a correction does nothing, whatever its bounds; so it has none.
    """
    shard = drawn(state, state.evaluator, rng_key, state.version)
    return gradient(state, shard, measured_losses(state)["none"])


def drawn(state: TrainState, sampler: Sampler, rng_key: RngKey, version: int | None = None) -> Shard:
    """What the loss needs of the step's prompts, drawn again by a sampler with this key.

    version: of the sampler's weights, where it does not say so itself: an evaluator draws with the trainer's.
    """
    batch = collect_step(state, state.step, sampler, rng_key)
    if version is not None:
        rollouts = [replace(rollout, weight_version=version) for rollout in batch.rollouts]
        batch = replace(batch, rollouts=rollouts)
    return prepare(state, batch).shard


def gradient(state: TrainState, shard: Shard, loss: LossConfig) -> torch.Tensor:
    """The gradient of a loss before an update, fp32 on the CPU: a tensor of its own. loss: resolved.

    [layout.trained_numel], or with ranks this rank's part (Slices.sum_roots); all ranks call this together.
    """
    cfg, scale = state.config, state.scaler.scale
    work = ShardWork(
        cfg.sampling.sampling_params,
        loss,
        state.micro_batch,
        cfg.task.directory,
        scale,
        replayed=cfg.perturb.routing == "replayed",
        sequences=len(shard.rollouts),
    )
    _, total = state.parallel.sum_shards(work, shard.cut(cfg.virtual_shards))
    if total is None:  # no rank has a gradient
        slices = state.optimizer.slices
        part = slices.of_gradient(slices.own)
        return torch.zeros(part.stop - part.start)
    # The scale is a power of two, so the division is exact.
    return total.detach().to("cpu", copy=True).div_(scale)
