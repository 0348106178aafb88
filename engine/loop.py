"""The training loop: one step on one screen, and the run around it.

Shapes: P prompts, G samples of each, sequences in canonical order (prompt by prompt, sample by sample), C completion tokens.
"""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ..kernels.philox import Stream
from ..model.decoder import Decoder
from ..verify.mismatch import mismatch_metrics
from .advantage import advantages, all_equal
from .collect import Collected, collect
from .config import Config
from .evaluate import Evaluation, evaluate
from .learner import Learner
from .loss import LossConfig, sequence_weights
from .monitor import Monitor
from .ranked import RankedScorer, RankedWorkers
from .ranks import Ranks
from .record import Recorder
from .rollout import Keys, Rollout, Sampler, Sampling
from .scaling import LossScaler
from .scorer import Scorer
from .shaping import shaped_rewards
from .shard import Scored, cut_shards, shard_gradient
from .tasks import Reward
from .tasks.base import Problem
from .text import Text
from .workers import Workers


@dataclass
class TrainState:
    """Everything a step reads and changes."""

    config: Config
    policy: Decoder
    learner: Learner
    scaler: LossScaler
    sampler: Sampler
    evaluator: Sampler  # draws from the trainer's policy
    behaviour: Scorer | RankedScorer | None  # scores with the sampler's weights, where it has its own
    workers: Workers | RankedWorkers
    reference: Scorer | RankedScorer | None  # frozen, for the KL term
    text: Text
    reward: Reward
    problems: Sequence[Problem]  # training problems
    prompt_ids: Sequence[Sequence[int]]  # of the training problems
    step: int = 0
    version: int = 0  # of the weights: the number of optimizer updates so far
    ledger: Recorder | None = None

    @property
    def ranks(self) -> Ranks:
        """The ranks that the learner's state is spread over."""
        return self.learner.slices.ranks

    def close(self) -> None:
        """End what runs beside this process, and the ledger's file."""
        for owned in (self.ledger, self.sampler, self.behaviour, self.reference, self.workers):
            if owned is not None:
                owned.close()


@dataclass(frozen=True)
class StepRecord:
    """What a step leaves behind for reports."""

    metrics: dict[str, float]
    rollouts: list[Rollout]
    problems: list[Problem]
    texts: list[list[str]]
    rewards: np.ndarray  # [P, G]
    advantages: np.ndarray  # [P, G]
    notes: dict[str, str] = field(default_factory=dict)  # metrics that are no numbers


def train_step(state: TrainState) -> StepRecord:
    """One step: sample, score, and update. Raises MismatchError before any update (see Monitor)."""
    cfg, began = state.config, time.perf_counter()
    sampling = Sampling(cfg.sampling.distribution, cfg.samples, cfg.sampling.max_tokens, state.text.stop_ids)
    got = collect(cfg, state.step, state.sampler, sampling, state.text, state.reward, state.problems, state.prompt_ids, state.ranks)
    rollouts = got.rollouts  # P x G
    sampled = time.perf_counter()

    loss_cfg = cfg.loss.resolve()
    lengths = [len(x.completion_ids) for x in rollouts]
    reference = state.reference.score(rollouts, sampling.distribution) if state.reference else None
    shaped = shaped_rewards(got.rewards, lengths, loss_cfg, cfg.sampling.max_tokens, [x.logprobs for x in rollouts], reference)  # [P, G]
    A = advantages(shaped, loss_cfg.advantage)  # [P, G]
    weights = np.array(sequence_weights(lengths, loss_cfg.normaliser, cfg.sampling.max_tokens))
    stale = state.version - rollouts[0].weight_version  # how old the weights sampled from are
    old = state.behaviour.score(rollouts, sampling.distribution) if stale else None  # logp at those weights; None: they are the trainer's
    scaler = state.scaler
    work = partial(shard_gradient, distribution=sampling.distribution, loss=loss_cfg, micro_batch=cfg.micro_batch, watch=scaler.on)
    monitor, notes = Monitor(state.step, cfg.exact, state.version, cfg.max_staleness), {}
    for update in range(cfg.updates_per_rollout):
        shards = cut_shards(rollouts, A, weights, cfg.virtual_shards, old, reference)
        done, gradient = state.workers.sum_shards(partial(work, scale=scaler.scale), shards)
        parts = [micro_batch for shard in done if shard for micro_batch in shard]
        logp = torch.cat([part.logp for part in parts])
        if update == 0:
            monitor.compare(logp if old is None else torch.from_numpy(np.concatenate(old)), rollouts)  # 0.0 everywhere, or stop and show
            metrics = monitor.metrics() | step_losses(parts)
            old = old or [x.numpy() for x in logp.split(lengths)]
        if update or stale:
            metrics |= monitor.staleness(logp)
        ledger = state.ledger.updating(state.learner, logp, gradient, scaler.scale) if state.ledger else nullcontext()
        with ledger, state.workers.own_threads():
            updated = scaler.update(state.learner, gradient, parts)  # overflow, clipping, AdamW, fp32 master weights
        metrics, notes = metrics | updated.metrics, notes | updated.notes
        state.version += updated.applied
    state.sampler.load_weights(state.policy.w, state.version)
    metrics |= rollout_metrics(rollouts, got.texts, got.rewards) | {"tokens": monitor.tokens}
    metrics |= loss_metrics(loss_cfg, got, shaped, reference) | ({"staleness/versions": stale} if cfg.max_staleness else {})
    if state.ledger:
        metrics["time/ledger_s"] = state.ledger.record(state, rollouts, got.rewards, A)
        state.ledger.check_ranks(state.ranks)
    metrics |= {"time/sample_s": sampled - began, "time/train_s": time.perf_counter() - sampled}
    record = StepRecord({"step": state.step} | metrics, rollouts, got.problems, got.texts, got.rewards, A, notes)
    state.step += 1
    return record


def step_losses(parts: Sequence[Scored]) -> dict[str, float]:
    """Loss and mean entropy of a step, by correctly rounded sums over its tokens."""
    entropies = [e for part in parts for e in part.entropies]
    return {"loss": math.fsum(x for part in parts for x in part.losses), "entropy": math.fsum(entropies) / len(entropies)}


def rollout_metrics(rollouts: Sequence[Rollout], texts: Sequence[Sequence[str]], r: np.ndarray) -> dict[str, float]:
    """Rewards and lengths of a step, and how many completions the special rules met."""
    lengths = [len(x.completion_ids) for x in rollouts]
    every = r.reshape(-1).tolist()
    mean = math.fsum(every) / len(every)
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((v - mean) ** 2 for v in every) / len(every)),
        "response_len/mean": sum(lengths) / len(lengths),
        "response_len/max": max(lengths),
        "groups/all_equal": sum(all_equal(group) for group in r.tolist()),  # advantage 0 (or equal): no gradient from these
        "completions/empty": sum(not t for group in texts for t in group),  # the stop token alone: trained on like any other
        "completions/cut": sum(x.finish == "length" for x in rollouts),  # no stop token: scored and trained on as they are
    }


def loss_metrics(cfg: LossConfig, got: Collected, shaped: np.ndarray, reference: Sequence[np.ndarray] | None) -> dict[str, float]:
    """What the parts of the loss that are not always there have to say. cfg is resolved."""
    metrics = {}
    if cfg.draws > 1:
        metrics["groups/drawn"] = got.drawn
    if (shaped != got.rewards).any():
        metrics["reward/shaped_mean"] = math.fsum(shaped.reshape(-1).tolist()) / shaped.size
    if reference is not None:
        policy, lengths = [x.logprobs for x in got.rollouts], [len(x) for x in reference]
        metrics |= mismatch_metrics(np.concatenate(reference), np.concatenate(policy), lengths, prefix="reference/")
    return metrics


def held_out(state: TrainState, problems: Sequence[Problem], prompt_ids: Sequence[Sequence[int]]) -> Evaluation:
    """Evaluate the current policy on held-out problems."""
    cfg = state.config
    distribution = cfg.sampling.distribution._replace(temperature=cfg.evaluation.temperature)
    keys = Keys(cfg.seed, state.step, Stream.EVALUATE)
    return evaluate(
        state.evaluator,
        state.text,
        problems,
        prompt_ids,
        state.reward,
        distribution,
        cfg.evaluation.samples,
        cfg.sampling.max_tokens,
        keys,
    )
