"""The work of one virtual shard: forward and backward of its sequences, in micro-batches.

Shapes: n sequences of the shard, in canonical order; C completion tokens of a micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from ..kernels.logprob import Distribution
from ..model.decoder import Decoder
from ..model.scoring import logprobs, pack
from .loss import LossConfig, policy_loss
from .rollout import Rollout

X = TypeVar("X")


@dataclass(frozen=True)
class Shard:
    """Consecutive sequences of a step, with their advantages and loss weights [n]."""

    rollouts: Sequence[Rollout]
    advantages: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class Scored:
    """What a micro-batch leaves behind: the trainer's logp [C], and weighted loss and entropy of each token."""

    logp: torch.Tensor
    losses: list[float]
    entropies: list[float]


def cut_shards(rollouts: Sequence[Rollout], A: np.ndarray, weights: np.ndarray, shards: int) -> list[Shard | None]:
    """The virtual shards of a step, None where one is empty. A [P, G], weights [P G]."""
    places = virtual_shards(range(len(rollouts)), shards)
    return [Shard([rollouts[i] for i in at], A.reshape(-1)[at], weights[at]) if at else None for at in places]


def virtual_shards(sequences: Sequence[X], shards: int) -> list[Sequence[X]]:
    """`sequences` cut into `shards` consecutive parts of nearly one size; some are empty when there are few."""
    n = len(sequences)
    return [sequences[s * n // shards : (s + 1) * n // shards] for s in range(shards)]


def micro_batches(n: int, size: int) -> Iterator[slice]:
    """Consecutive sequences of a shard of n, `size` at a time."""
    for a in range(0, n, size):
        yield slice(a, min(a + size, n))


def shard_gradient(decoder: Decoder, shard: Shard, distribution: Distribution, loss: LossConfig, micro_batch: int) -> list[Scored]:
    """Forward and backward of a shard, `micro_batch` sequences at a time. `loss` is a resolved one."""
    done = []
    for at in micro_batches(len(shard.rollouts), micro_batch):
        part = Shard(shard.rollouts[at], shard.advantages[at], shard.weights[at])
        done.append(_micro_batch_gradient(decoder, part, distribution, loss))
    return done


def _micro_batch_gradient(decoder: Decoder, part: Shard, distribution: Distribution, loss_cfg: LossConfig) -> Scored:
    """Sequences without advantage have a gradient of exactly zero: a micro-batch of such only is compared, not differentiated."""
    packed = pack([r.pair for r in part.rollouts])
    lengths = torch.tensor(packed.completion_lengths)
    with torch.set_grad_enabled(bool(part.advantages.any())):
        # What follows is small, and has one order of its sums on a CPU.
        logp, entropy = (x.cpu() for x in logprobs(decoder, packed, distribution))
        old = torch.from_numpy(np.concatenate([r.logprobs for r in part.rollouts]))
        per_token = torch.from_numpy(part.advantages).float().repeat_interleave(lengths)
        loss = policy_loss(logp, old, per_token, loss_cfg)
        loss = loss * torch.from_numpy(part.weights).float().repeat_interleave(lengths)
        if loss.requires_grad:
            loss.sum().backward()
    return Scored(logp.detach(), loss.detach().tolist(), entropy.tolist())
