"""The training loop: one step on one screen, and the run around it.

Shapes: P prompts, G samples of each, sequences in canonical order (prompt by prompt, sample by sample), C completion tokens.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ..kernels.philox import Stream, permutation
from ..model.decoder import Decoder
from .advantage import advantages, all_equal
from .config import Config
from .evaluate import Evaluation, evaluate, group_texts
from .learner import Learner
from .loss import sequence_weights
from .monitor import Monitor
from .ranks import ALONE, RankedWorkers, Ranks
from .record import Recorder
from .rollout import Keys, Rollout, Sampler, Sampling
from .scaling import LossScaler
from .shard import Scored, cut_shards, shard_gradient
from .tasks import Reward, rewards
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
    workers: Workers | RankedWorkers
    text: Text
    reward: Reward
    problems: Sequence[Problem]  # training problems
    prompt_ids: Sequence[Sequence[int]]  # of the training problems
    step: int = 0
    version: int = 0  # of the weights: the number of optimizer updates so far
    ledger: Recorder | None = None
    ranks: Ranks = ALONE


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
    chosen = step_problems(len(state.problems), cfg.prompts, cfg.seed, state.step)
    problems = [state.problems[i] for i in chosen]
    sampling = Sampling(cfg.sampling.distribution, cfg.samples, cfg.sampling.max_tokens, state.text.stop_ids)
    rollouts = state.sampler.generate([state.prompt_ids[i] for i in chosen], sampling, Keys(cfg.seed, state.step))  # P x G
    texts = group_texts(state.text, rollouts, cfg.samples)
    sampled = time.perf_counter()

    loss_cfg = cfg.loss.resolve()
    r = state.ranks.from_first(lambda: rewards(state.reward, problems, texts))  # [P, G]
    A = advantages(r, loss_cfg.advantage)  # [P, G]
    weights = np.array(sequence_weights([len(x.completion_ids) for x in rollouts], loss_cfg.normaliser, cfg.sampling.max_tokens))
    shards = cut_shards(rollouts, A, weights, cfg.virtual_shards)
    scaler = state.scaler
    work = partial(shard_gradient, distribution=sampling.distribution, loss=loss_cfg, micro_batch=cfg.micro_batch, watch=scaler.on)
    monitor, notes = Monitor(state.step, cfg.exact, state.version), {}
    for update in range(cfg.updates_per_rollout):
        done, gradient = state.workers.sum_shards(partial(work, scale=scaler.scale), shards)
        parts = [micro_batch for shard in done if shard for micro_batch in shard]
        logp = torch.cat([part.logp for part in parts])
        if update == 0:
            monitor.compare(logp, rollouts)  # 0.0 everywhere, or stop and show where
            metrics = monitor.metrics() | step_losses(parts)
        else:
            metrics |= monitor.staleness(logp)
        scale = scaler.scale
        updated = scaler.update(state.learner, gradient, parts)  # overflow, clipping, AdamW, fp32 master weights
        metrics, notes = metrics | updated.metrics, notes | updated.notes
        state.version += updated.applied
        if state.ledger:
            state.ledger.updated(state.policy, logp, gradient, scale)
    state.sampler.load_weights(state.policy.w, state.version)
    metrics |= rollout_metrics(rollouts, texts, r) | {"tokens": monitor.tokens}
    if state.ledger:
        metrics["time/ledger_s"] = state.ledger.record(state, rollouts, r, A)
        state.ledger.check_ranks(state.ranks)
    metrics |= {"time/sample_s": sampled - began, "time/train_s": time.perf_counter() - sampled}
    record = StepRecord({"step": state.step} | metrics, rollouts, problems, texts, r, A, notes)
    state.step += 1
    return record


def step_losses(parts: Sequence[Scored]) -> dict[str, float]:
    """Loss and mean entropy of a step, by correctly rounded sums over its tokens."""
    entropies = [e for part in parts for e in part.entropies]
    return {"loss": math.fsum(x for part in parts for x in part.losses), "entropy": math.fsum(entropies) / len(entropies)}


def step_problems(n: int, prompts: int, seed: int, step: int, stream: Stream = Stream.ORDER) -> list[int]:
    """The step's problems: the data set in a new random order each epoch, cut into steps without a remainder lost."""
    place = range(step * prompts, (step + 1) * prompts)
    orders = {epoch: permutation(n, seed, stream, epoch) for epoch in {p // n for p in place}}
    return [int(orders[p // n][p % n]) for p in place]


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


def held_out(state: TrainState, problems: Sequence[Problem], prompt_ids: Sequence[Sequence[int]]) -> Evaluation:
    """Evaluate the current policy on held-out problems."""
    cfg = state.config
    distribution = cfg.sampling.distribution._replace(temperature=cfg.evaluation.temperature)
    keys = Keys(cfg.seed, state.step, Stream.EVALUATE)
    return evaluate(
        state.sampler,
        state.text,
        problems,
        prompt_ids,
        state.reward,
        distribution,
        cfg.evaluation.samples,
        cfg.sampling.max_tokens,
        keys,
    )
