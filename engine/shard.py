"""The work of one virtual shard: forward and backward of its prompts and of their samples, in micro-batches.

Shapes: n sequences of the shard, in canonical order; C completion tokens of a micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from ..kernels.logprob import Distribution
from ..model.decoder import Decoder, ignore
from ..model.prompts import Prompts, prompt_passes
from ..model.scoring import logprobs, pack
from .loss import LossConfig, policy_loss
from .rollout import Rollout
from .underflow import PromptUnderflow, Underflow

X = TypeVar("X")


@dataclass(frozen=True)
class Shard:
    """Consecutive sequences of a step, with their advantages and loss weights [n], and other logprobs of each, [C]."""

    rollouts: Sequence[Rollout]
    advantages: np.ndarray
    weights: np.ndarray
    old: Sequence[np.ndarray] | None = None  # the trainer's at the weights sampled from; None where those are its weights now
    reference: Sequence[np.ndarray] | None = None

    def part(self, at: slice) -> "Shard":
        """Some of the sequences."""
        old, reference = (None if x is None else x[at] for x in (self.old, self.reference))
        return Shard(self.rollouts[at], self.advantages[at], self.weights[at], old, reference)


@dataclass(frozen=True)
class Scored:
    """What a micro-batch leaves behind: the trainer's logp [C], weighted loss and entropy of each token, and lost gradients.

    Prompts leave the last alone.
    """

    logp: torch.Tensor
    losses: list[float]
    entropies: list[float]
    underflow: dict[str, int]  # zeros in the gradients watched (underflow.py); empty unless asked for


def cut_shards(
    rollouts: Sequence[Rollout],
    A: np.ndarray,
    weights: np.ndarray,
    shards: int,
    old: Sequence[np.ndarray] | None = None,
    reference: Sequence[np.ndarray] | None = None,
) -> list[Shard | None]:
    """The virtual shards of a step, None where one is empty. A [P, G], weights [P G]; old and reference: [C] of each rollout."""
    whole = Shard(rollouts, A.reshape(-1), weights, old, reference)
    return [whole.part(slice(at.start, at.stop)) if at else None for at in virtual_shards(range(len(rollouts)), shards)]


def virtual_shards(sequences: Sequence[X], shards: int) -> list[Sequence[X]]:
    """`sequences` cut into `shards` consecutive parts of nearly one size; some are empty when there are few."""
    n = len(sequences)
    return [sequences[s * n // shards : (s + 1) * n // shards] for s in range(shards)]


def micro_batches(n: int, size: int) -> Iterator[slice]:
    """Consecutive sequences of a shard of n, `size` at a time."""
    for a in range(0, n, size):
        yield slice(a, min(a + size, n))


def shard_gradient(
    decoder: Decoder, shard: Shard, distribution: Distribution, loss: LossConfig, micro_batch: int, scale: float = 1.0, watch: bool = False
) -> list[Scored]:
    """Forward and backward of a shard, `micro_batch` sequences at a time. `loss` is a resolved one, multiplied by `scale`.

    watch: count the gradients that the compute dtype could not hold.
    """
    done = []
    for at in prompt_passes([r.prompt_ids for r in shard.rollouts]):
        part = shard.part(at)
        lost = PromptUnderflow() if watch else None
        with torch.set_grad_enabled(_has_gradient(part, loss)):
            prompts = Prompts(decoder, [r.prompt_ids for r in part.rollouts], lost.tap if lost else ignore)
        if lost:
            lost.watch(prompts)
        for some in micro_batches(len(part.rollouts), micro_batch):
            done.append(_micro_batch_gradient(decoder, part.part(some), prompts, prompts.of[some], distribution, loss, scale, lost))
        prompts.backward()
        if lost:
            done.append(Scored(torch.empty(0), [], [], lost.zeros))
    return done


def _has_gradient(part: Shard, loss: LossConfig) -> bool:
    """Sequences without advantage have no policy gradient: those alone may be compared without being differentiated."""
    return bool(loss.square or loss.kl_coef or part.advantages.any())


def _micro_batch_gradient(
    decoder: Decoder, part: Shard, prompts: Prompts, after: Sequence[int], distribution: Distribution, loss_cfg: LossConfig,
    scale: float, lost: PromptUnderflow | None,
) -> Scored:  # fmt: skip
    """after: the prompt of each sequence, among `prompts`."""
    packed = pack([r.pair for r in part.rollouts], after)
    lengths = packed.completion_lengths
    each = torch.tensor(lengths)
    with torch.set_grad_enabled(_has_gradient(part, loss_cfg)):
        counter = Underflow(packed, lost) if lost else None
        # What follows the logprobs is small, and has one order of its sums on a CPU.
        logp, entropy = (x.cpu() for x in logprobs(decoder, packed, distribution, counter.tap if counter else ignore, prompts))
        sampler = torch.from_numpy(np.concatenate([r.logprobs for r in part.rollouts]))
        old = logp.detach() if part.old is None else torch.from_numpy(np.concatenate(part.old))
        reference = None if part.reference is None else torch.from_numpy(np.concatenate(part.reference))
        A = torch.from_numpy(part.advantages).float().repeat_interleave(each)
        loss = policy_loss(logp, old, sampler, A, lengths, loss_cfg, reference)
        loss = loss * torch.from_numpy(part.weights).float().repeat_interleave(each)
        if loss.requires_grad:
            if counter:
                counter.watch(logp)
            (loss.sum() * scale).backward()
    return Scored(logp.detach(), loss.detach().tolist(), entropy.tolist(), counter.zeros if counter else {})
