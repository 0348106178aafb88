"""The training loop: one step on one screen, and the run around it.

Shapes: P prompts, G samples of each, sequences in canonical order (prompt by prompt, sample by sample), C completion tokens.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..kernels.philox import Stream, permutation
from ..model.decoder import Decoder
from ..model.scoring import logprobs, pack
from .advantage import advantages, all_equal
from .config import Config
from .evaluate import Evaluation, evaluate, group_texts
from .learner import Learner
from .loss import policy_loss, sequence_weights
from .monitor import Monitor
from .rollout import Keys, Rollout, Sampler, Sampling
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
    sampler: Sampler
    text: Text
    reward: Reward
    problems: Sequence[Problem]  # training problems
    prompt_ids: Sequence[Sequence[int]]  # of the training problems
    workers: Workers = field(default_factory=Workers)
    step: int = 0
    version: int = 0  # of the weights: the number of optimizer updates so far


@dataclass(frozen=True)
class StepRecord:
    """What a step leaves behind for reports."""

    metrics: dict[str, float]
    rollouts: list[Rollout]
    problems: list[Problem]
    texts: list[list[str]]
    rewards: np.ndarray  # [P, G]
    advantages: np.ndarray  # [P, G]


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
    r = rewards(state.reward, problems, texts)  # [P, G]
    A = advantages(r, loss_cfg.advantage)  # [P, G]
    weights = np.array(sequence_weights([len(x.completion_ids) for x in rollouts], loss_cfg.normaliser, cfg.sampling.max_tokens))
    monitor = Monitor(state.step, cfg.exact, state.version)
    for update in range(cfg.updates_per_rollout):
        shards = list(virtual_shards(len(rollouts), cfg.virtual_shards))
        done = state.learner.sum_shards(shards, lambda policy, s: shard_gradient(cfg, policy, s, rollouts, A, weights), state.workers)
        parts = [micro_batch for shard in done for micro_batch in shard]
        if update == 0:
            for part in parts:
                monitor.compare(part.logp, part.rollouts)  # 0.0 everywhere, or stop and show where
            metrics = monitor.metrics() | step_losses(parts)
        else:
            metrics |= monitor.staleness([part.logp for part in parts])
        metrics |= state.learner.update()  # clipping, AdamW, fp32 master weights
        state.version += 1
    state.sampler.load_weights(state.policy.w, state.version)
    metrics |= rollout_metrics(rollouts, texts, r) | {"tokens": monitor.tokens}
    metrics |= {"time/sample_s": sampled - began, "time/train_s": time.perf_counter() - sampled}
    record = StepRecord({"step": state.step} | metrics, rollouts, problems, texts, r, A)
    state.step += 1
    return record


@dataclass(frozen=True)
class MicroBatch:
    """What a micro-batch leaves behind: the trainer's logp [C], and weighted loss and entropy of each token."""

    rollouts: list[Rollout]
    logp: torch.Tensor
    losses: list[float]
    entropies: list[float]


def shard_gradient(
    cfg: Config, policy: Decoder, shard: range, rollouts: Sequence[Rollout], A: np.ndarray, weights: np.ndarray
) -> list[MicroBatch]:
    """Forward and backward of a virtual shard's sequences, in micro-batches. A [P, G], weights [P G]."""
    done = []
    for mb in micro_batches(shard, cfg.micro_batch):
        done.append(micro_batch_gradient(cfg, policy, [rollouts[i] for i in mb], A.reshape(-1)[mb], weights[mb]))
    return done


def micro_batch_gradient(cfg: Config, policy: Decoder, batch: list[Rollout], A: np.ndarray, weights: np.ndarray) -> MicroBatch:
    """Forward and backward of some sequences. A, weights [sequences].

    Sequences without advantage have a gradient of exactly zero: a micro-batch of such only is compared, not differentiated.
    """
    packed = pack([r.pair for r in batch])
    lengths = torch.tensor(packed.completion_lengths)
    with torch.set_grad_enabled(bool(A.any())):
        logp, entropy = logprobs(policy, packed, cfg.sampling.distribution)
        old = torch.from_numpy(np.concatenate([r.logprobs for r in batch]))
        per_token = torch.from_numpy(A).float().repeat_interleave(lengths)
        loss = policy_loss(logp, old, per_token, cfg.loss.resolve())
        loss = loss * torch.from_numpy(weights).float().repeat_interleave(lengths)
        if loss.requires_grad:
            loss.sum().backward()
    return MicroBatch(batch, logp.detach(), loss.detach().tolist(), entropy.tolist())


def step_losses(parts: Sequence[MicroBatch]) -> dict[str, float]:
    """Loss and mean entropy of a step, by correctly rounded sums over its tokens."""
    entropies = [e for part in parts for e in part.entropies]
    return {"loss": math.fsum(x for part in parts for x in part.losses), "entropy": math.fsum(entropies) / len(entropies)}


def virtual_shards(n: int, shards: int) -> Iterator[range]:
    """Sequences 0 .. n - 1 cut into `shards` consecutive parts of nearly one size; some are empty when n is small."""
    for s in range(shards):
        yield range(s * n // shards, (s + 1) * n // shards)


def micro_batches(shard: range, size: int) -> Iterator[list[int]]:
    """Consecutive sequences of a shard, `size` at a time."""
    for a in range(shard.start, shard.stop, size):
        yield list(range(a, min(a + size, shard.stop)))


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
