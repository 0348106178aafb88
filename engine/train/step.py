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

from ..loss.advantage import StepAdvantages, advantages, of_tokens
from ..loss.budget_relative import cut_advantages
from ..loss.config import LossConfig
from ..loss.critic import Critic, critic_metrics, critic_of, token_rewards
from ..loss.dpo import dpo_metrics, margins, pair_advantages
from ..loss.policy_loss import sequence_weights
from ..loss.reward_shaping import completion_kl, shaped_rewards
from ..loss.semantic_entropy import scaled_by_entropy
from ..loss.verifree import answer_advantages, answer_metrics
from ..rollout.answers import answer_length
from ..rollout.types import Rollout
from .collect import RolloutBatch, collect
from .metrics import loss_metrics, rollout_metrics, step_losses
from .monitor import Monitor, check_values
from .observer import StepObserver
from .performance import performance
from .recorder import Recorder
from .shard import Shard, ShardWork, joined_experts, mean_load_balance
from .state import StepRecord, TrainState


def train_step(
    state: TrainState, recorder: Recorder | None = None, observer: StepObserver | None = None
) -> StepRecord:
    """One step: sample, score and update. Where a bit differs, raises MismatchError before any update.

    recorder: writes the step's line of the ledger. Ranks must have one, or none, together.
    observer: is shown the step. It sees this process only, so state.parallel.n must be 1.
    """
    cfg, loss_cfg, began_s = state.config, state.config.loss.resolve(), time.perf_counter()
    station = state.stopwatch.start()
    batch = collect(state)  # P prompts x G generations: tokens, sampling logprobs, rewards
    sampled_s = time.perf_counter()
    with station("time/score_s"):
        step, A, metrics = prepare(state, batch)  # advantages, loss weights, old and reference logprobs
    rollouts = step.rollouts  # those that are trained on
    lengths = [len(rollout.logprobs) for rollout in rollouts]
    monitor, notes = Monitor(state.step, cfg.exact, state.version, cfg.max_staleness), {}
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
            metrics |= monitor.metrics() | step_losses(scored) | mean_load_balance(scored)
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
        metrics["time/ledger_s"] = recorder.record(state.step, batch, A, state.scaler.state, step.critic)
        recorder.check_ranks()
    times = {"time/sample_s": sampled_s - began_s, "time/train_s": time.perf_counter() - sampled_s}
    times |= state.stopwatch.seconds()
    metrics |= times | performance(state, step, times)
    state.step += 1
    metrics = {"step": state.step - 1} | metrics
    old_logprobs = iter(step.old_logprobs)
    own = None if cfg.exact else [next(old_logprobs) if is_kept else None for is_kept in batch.trained.flat]
    return StepRecord(metrics, batch, A, own, notes)


def _refuse_no_gradient(surrogate: str, A: Sequence[np.ndarray]) -> None:
    """Raise ValueError if there is an advantage that is not 0: a run would go on, and learn nothing."""
    if count := sum(bool(of_completion.any()) for of_completion in A):
        raise ValueError(
            f"loss.surrogate: {surrogate} gave a gradient of exactly 0, although the advantages of {count} "
            f"of {len(A)} completions are not 0; its slope must be the derivative of its value by logp"
        )


def prepare(state: TrainState, batch: RolloutBatch) -> tuple[Shard, StepAdvantages, dict[str, float]]:
    """What the loss needs, except the trainer's logprobs; the step's advantages; and metrics of both.

    All of it is known before any forward of the trainer's current weights.
    """
    cfg, loss_cfg = state.config, state.config.loss.resolve()
    params, trained = cfg.sampling.sampling_params, batch.trained
    rollouts = [r for r, is_kept in zip(batch.rollouts, trained.flat, strict=True) if is_kept]  # [n]
    sampling_logprobs, ref_logprobs = [rollout.logprobs for rollout in rollouts], None
    kl_PG: np.ndarray | None = None
    if state.ref_policy:
        ref_logprobs = state.ref_policy.score(rollouts, params)
        if loss_cfg.kl_in == "reward":
            kl_PG = batch.placed(completion_kl(sampling_logprobs, ref_logprobs, loss_cfg))
    shaped = shaped_rewards(batch.rewards, batch.lengths, loss_cfg, state.max_tokens, trained, kl_PG)
    metrics = loss_metrics(loss_cfg, batch, shaped, sampling_logprobs, ref_logprobs)
    critic = _critic(state, batch, rollouts, shaped) if state.critic else None
    if critic is not None:
        A_step, of_advantages = _of_all(batch, critic.advantages), critic_metrics(critic)
    else:
        A_step, of_advantages = _advantages(loss_cfg, batch, shaped, sampling_logprobs, ref_logprobs)
    metrics |= of_advantages
    lengths = batch.lengths[trained].tolist()
    weights = sequence_weights(lengths, loss_cfg.loss_agg_mode, state.max_tokens, trained.size)
    # The number of updates by which the weights that were sampled from are older than the trainer's.
    staleness = state.version - rollouts[0].weight_version
    old_logprobs = state.old_policy.score(rollouts, params) if staleness else None
    if cfg.max_staleness:
        metrics["staleness/versions"] = staleness
    if isinstance(A_step, list):
        A = [of_rollout for of_rollout, is_kept in zip(A_step, trained.flat, strict=True) if is_kept]
    else:
        A = of_tokens(A_step[trained].tolist(), lengths)
    of_kl_term, of_critic = ref_logprobs if loss_cfg.kl_coef else None, critic[:2] if critic else ()
    return Shard(rollouts, A, np.array(weights), old_logprobs, of_kl_term, *of_critic), A_step, metrics


def _critic(
    state: TrainState, batch: RolloutBatch, rollouts: Sequence[Rollout], shaped: np.ndarray
) -> Critic:
    """Values, targets and advantages of the rollouts that are trained on. shaped [P, G]: rewards."""
    places, R = np.flatnonzero(batch.trained).tolist(), shaped.reshape(-1).tolist()
    of_turns = batch.turn_rewards or [None] * len(batch.rollouts)
    rewards = [
        token_rewards(r.drawn, r.turn_starts, of_turns[i], R[i])
        for r, i in zip(rollouts, places, strict=True)
    ]
    return critic_of(rewards, state.critic.values(rollouts), state.config.loss.resolve())


def _of_all(batch: RolloutBatch, of_trained: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Advantages [n][C] of the rollouts that are trained on, in their places of [P G]; 0 elsewhere."""
    values, places = iter(of_trained), zip(batch.trained.flat, batch.lengths.flat, strict=True)
    return [next(values) if is_kept else np.zeros(C) for is_kept, C in places]


def _advantages(
    loss: LossConfig,
    batch: RolloutBatch,
    shaped: np.ndarray,
    logprobs: Sequence[np.ndarray],
    ref_logprobs: Sequence[np.ndarray] | None,
) -> tuple[StepAdvantages, dict[str, float]]:
    """The advantages of a step, and the metrics that some losses have of them.

    loss: resolved. shaped [P, G]: rewards. logprobs, ref_logprobs: [C] of each rollout that is trained on;
    where tokens are given, all are.
    """
    if loss.advantage == "dpo":
        of_pairs = margins(logprobs, ref_logprobs, loss.beta)
        return pair_advantages(of_pairs, loss.beta), dpo_metrics(of_pairs)
    if loss.advantage == "verifree":
        answers = [answer_length(rollout) for rollout in batch.rollouts]
        lengths = [len(logp) for logp in logprobs]
        return answer_advantages(shaped, lengths, answers), answer_metrics(logprobs, answers)
    if batch.cuts is not None:
        return cut_advantages(shaped, batch.lengths, batch.cuts), {}
    A = advantages(shaped, loss.advantage, batch.trained, loss.k)
    if batch.classes is not None:
        A = scaled_by_entropy(A, batch.classes, loss.semantic_entropy)
    return A, {}
