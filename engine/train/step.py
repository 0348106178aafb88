"""One training step, on one screen.

From rollouts to the update of the weights:

1. `ShardWork` (shard.py) does the forward and backward of virtual shards.
2. `state.parallel` (parallel/) does all shards, and adds their gradients by the fixed tree.
3. `state.scaler` (loss_scaling.py) hands the sum to the optimizer (optimizer.py). After an overflow it skips
   the update.

Shapes: P prompts, G generations of each, sequences in canonical order (prompt by prompt, generation by
generation), C drawn tokens.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from .collect import collect
from .gradient_bias import step_bias
from .ledger_recorder import Recorder
from .metrics import rollout_metrics
from .monitor import Monitor, check_values
from .performance import performance
from .prepare import prepare
from .scored import joined_experts, step_losses
from .shard import ShardWork
from .state import StepRecord, TrainState
from .step_observer import StepObserver


def train_step(
    state: TrainState, recorder: Recorder | None = None, observer: StepObserver | None = None
) -> StepRecord:
    """One step: sample, score and update. Where a bit differs, raises MismatchError before any update.

    recorder: writes the step's line of the ledger. Ranks must have one, or none, together.
    observer: is shown the step. It sees this process only, so state.parallel.n must be 1.
    """
    cfg, loss_cfg, began_s = state.config, state.config.loss, time.perf_counter()
    station = state.stopwatch.start()
    batch = collect(state)  # P prompts x G generations: tokens, sampling logprobs, rewards
    sampled_s = time.perf_counter()
    with station("time/score_s"):
        prepared = prepare(state, batch)  # advantages, loss weights, old and reference logprobs
    step, rollouts = prepared.shard, prepared.shard.rollouts  # those that are trained on
    lengths = [len(rollout.logprobs) for rollout in rollouts]
    bias = step_bias(state, step)  # nothing, unless monitor.gradient asks for it in this step
    metrics, notes = prepared.metrics | bias.metrics, bias.notes
    monitor = Monitor(state.step, cfg.exact, state.version, cfg.max_staleness)
    for update in range(cfg.updates_per_rollout):
        params, scale = cfg.sampling.sampling_params, state.scaler.scale
        observe = partial(observer.forward, update) if observer else None
        work = ShardWork(
            params,
            loss_cfg,
            state.micro_batch,
            cfg.task.directory,
            scale,
            state.scaler.on,
            observe,
            cfg.perturb.routing == "replayed",
            len(rollouts),
        )
        with station("time/forward_backward_s"):
            results, gradient = state.parallel.sum_shards(work, step.cut(cfg.virtual_shards))  # a fixed tree
        scored = [micro_batch for shard in results if shard for micro_batch in shard]
        logp, experts = torch.cat([micro_batch.logp for micro_batch in scored]), joined_experts(scored)
        stale = update > 0 or step.old_logprobs is not None  # the weights are newer than those sampled from
        if step.old_logprobs is None:  # the later updates of this step are stale against these logprobs
            step = replace(step, old_logprobs=[x.numpy() for x in logp.split(lengths)])
        if update == 0:
            check_values(scored, step)
            old_logp = torch.from_numpy(np.concatenate(step.old_logprobs))
            monitor.compare(old_logp, rollouts)  # 0.0 everywhere, or stop and show where
            metrics |= monitor.metrics() | step_losses(scored)
            if state.compares_experts and rollouts[0].experts is not None:
                metrics |= monitor.compare_experts(experts, rollouts)
        if stale:
            metrics |= monitor.staleness(logp)
        recording = recorder.updating(logp, gradient, scale, experts) if recorder else nullcontext()
        # Clipping, AdamW, fp32 master weights.
        with recording, state.parallel.own_threads(), station("time/optimizer_s"):
            updated = state.scaler.update(state.optimizer, gradient, scored)
        if loss_cfg.surrogate and update == 0 and updated.metrics["grad_norm"] == 0.0:
            _refuse_no_gradient(loss_cfg.surrogate, step.advantages)
        metrics, notes = metrics | updated.metrics, notes | updated.notes
        if observer:
            observer.updated(update, gradient / scale)  # exact: the scale is a power of two
        state.version += updated.applied
    with station("time/sync_s"):
        state.sampler.sync_weights(state.version)
    metrics |= rollout_metrics(batch) | {"tokens": monitor.tokens}
    if recorder:  # hashes of tokens, logprobs, gradients, weights
        metrics["time/ledger_s"] = recorder.record(
            state.step, batch, prepared.advantages, state.scaler.state, step.critic
        )
        recorder.check_ranks()
    trained_s = time.perf_counter() - sampled_s - bias.seconds
    times = {"time/sample_s": sampled_s - began_s, "time/train_s": trained_s}
    times |= state.stopwatch.seconds()
    metrics |= times | performance(state, step, times)
    state.step += 1
    metrics = {"step": state.step - 1} | metrics
    old_logprobs = iter(step.old_logprobs)
    kept = batch.trained.flat
    by_rollout = None if cfg.exact else [next(old_logprobs) if is_kept else None for is_kept in kept]
    return StepRecord(metrics, batch, prepared.advantages, by_rollout, notes)


def _refuse_no_gradient(surrogate: str, A: Sequence[np.ndarray]) -> None:
    """Raise ValueError if there is an advantage that is not 0: a run would go on, and learn nothing."""
    if count := sum(bool(row.any()) for row in A):
        raise ValueError(
            f"loss.surrogate: {surrogate} gave a gradient of exactly 0, although the advantages of {count} "
            f"of {len(A)} completions are not 0; its slope must be the derivative of its value by logp"
        )
