"""The work of one virtual shard: forward and backward of its prompts and completions, in micro-batches.

Shapes: n sequences in canonical order; C completion tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.sampling_params import SamplingParams
from ...model.decoder import Decoder, no_hook
from ...model.prompts import Prompts, prompt_passes
from ...model.scoring import logprobs, pack
from ..loss.policy_loss import LossConfig, policy_loss
from ..parallel.partition import micro_batches, virtual_shards
from ..rollout.types import Rollout
from .underflow import PromptUnderflow, Underflow


@dataclass(frozen=True)
class Shard:
    """Consecutive sequences of a step, or all of them, with what the loss needs."""

    rollouts: Sequence[Rollout]  # [n]
    advantages: np.ndarray  # [n]
    weights: np.ndarray  # [n], of the loss
    # [n][C], the trainer's logprobs with the weights that were sampled from. None where the trainer still has
    # these weights.
    old_logprobs: Sequence[np.ndarray] | None = None
    ref_logprobs: Sequence[np.ndarray] | None = None  # [n][C], the reference's; None without a KL term

    def part(self, index: slice) -> "Shard":
        """The sequences that `index` selects."""
        old_logprobs = None if self.old_logprobs is None else self.old_logprobs[index]
        ref_logprobs = None if self.ref_logprobs is None else self.ref_logprobs[index]
        advantages, weights = self.advantages[index], self.weights[index]
        return Shard(self.rollouts[index], advantages, weights, old_logprobs, ref_logprobs)

    def cut(self, shards: int) -> list["Shard | None"]:
        """Cut the sequences into `shards` virtual shards; an empty shard is None."""
        parts = virtual_shards(range(len(self.rollouts)), shards)
        return [self.part(slice(part.start, part.stop)) if part else None for part in parts]


@dataclass(frozen=True)
class Scored:
    """What a micro-batch leaves behind. A pass over prompts leaves only `underflow`; the rest is empty."""

    logp: torch.Tensor  # [C], the trainer's
    losses: list[float]  # [C], weighted
    entropies: list[float]  # [C]
    underflow: dict[str, int]  # zeros in the watched gradients (underflow.py); empty unless ShardWork.watch


@dataclass(frozen=True)
class ShardWork:
    """shard_gradient and its arguments except the shard. A step hands it to its workers, so it is picklable.

    loss: resolved. The loss is multiplied by `scale`. watch: count the gradients that the compute dtype could
    not hold.
    """

    sampling_params: SamplingParams
    loss: LossConfig
    micro_batch: int
    scale: float = 1.0
    watch: bool = False

    def __call__(self, decoder: Decoder, shard: Shard) -> list[Scored]:
        """See shard_gradient."""
        return shard_gradient(decoder, shard, self)


def shard_gradient(decoder: Decoder, shard: Shard, work: ShardWork) -> list[Scored]:
    """Forward and backward of a shard, work.micro_batch sequences at a time.

    Gradients are added to `main_grad` of the weights: those of a pass's completions first, then those of its
    prompts.
    """
    scored = []
    for index in prompt_passes([rollout.prompt_ids for rollout in shard.rollouts]):
        part = shard.part(index)
        underflow = PromptUnderflow() if work.watch else None
        hook = underflow.hook if underflow else no_hook
        with torch.set_grad_enabled(_has_gradient(part, work.loss)):
            prompts = Prompts(decoder, [r.prompt_ids for r in part.rollouts], hook)
        if underflow:
            underflow.watch(prompts)
        for rows in micro_batches(len(part.rollouts), work.micro_batch):
            batch = part.part(rows)
            scored.append(_micro_batch_gradient(decoder, batch, prompts, prompts.of[rows], work, underflow))
        prompts.backward()
        if underflow:
            scored.append(Scored(torch.empty(0), [], [], underflow.zeros))
    return scored


def _has_gradient(part: Shard, loss: LossConfig) -> bool:
    """Whether the loss of these sequences has a gradient.

    A sequence with advantage 0 has no policy gradient. Where all advantages are 0 and no other term of the
    loss has a gradient, the forward alone is enough: the monitor needs its logprobs.
    """
    return bool(loss.square or loss.kl_coef or part.advantages.any())


def _concatenated(logprobs: Sequence[np.ndarray] | None) -> torch.Tensor | None:
    """The logprobs of all sequences in one tensor [C]."""
    return None if logprobs is None else torch.from_numpy(np.concatenate(logprobs))


def _micro_batch_gradient(
    decoder: Decoder,
    batch: Shard,
    prompts: Prompts,
    prompt_of: Sequence[int],
    work: ShardWork,
    prompt_underflow: PromptUnderflow | None,
) -> Scored:
    """Forward and backward of the completions of a micro-batch.

    prompt_of [n]: the index, in `prompts`, of the prompt of each sequence.
    """
    packed = pack([r.pair for r in batch.rollouts], prompt_of)
    lengths = packed.completion_lengths
    tokens = torch.tensor(lengths)
    with torch.set_grad_enabled(_has_gradient(batch, work.loss)):
        counter = Underflow(packed, prompt_underflow) if prompt_underflow else None
        hook = counter.hook if counter else no_hook
        # What follows is small. It is computed on the CPU, where its sums have one order.
        logp, entropy = (x.cpu() for x in logprobs(decoder, packed, work.sampling_params, hook, prompts))
        sampling_logprobs = _concatenated([r.logprobs for r in batch.rollouts])
        old_logprobs = logp.detach() if batch.old_logprobs is None else _concatenated(batch.old_logprobs)
        ref_logprobs = _concatenated(batch.ref_logprobs)
        A = torch.from_numpy(batch.advantages).float().repeat_interleave(tokens)
        loss = policy_loss(logp, old_logprobs, sampling_logprobs, A, lengths, work.loss, ref_logprobs)
        loss = loss * torch.from_numpy(batch.weights).float().repeat_interleave(tokens)
        if loss.requires_grad:
            if counter:
                counter.watch(logp)
            (loss.sum() * work.scale).backward()
    return Scored(logp.detach(), loss.detach().tolist(), entropy.tolist(), counter.zeros if counter else {})
