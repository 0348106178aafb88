"""The work of one virtual shard: forward and backward of its prompts and of their completions, in
micro-batches.

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
    """Consecutive sequences of a step (or all of them) with advantages and loss weights [n], and logprobs of
    each, [C].
    """

    rollouts: Sequence[Rollout]
    advantages: np.ndarray
    weights: np.ndarray
    # The trainer's, at the weights that were sampled from. None where those are its weights now.
    old_logprobs: Sequence[np.ndarray] | None = None
    ref_logprobs: Sequence[np.ndarray] | None = None

    def part(self, index: slice) -> "Shard":
        """The sequences that `index` selects."""
        old, ref = (None if x is None else x[index] for x in (self.old_logprobs, self.ref_logprobs))
        return Shard(self.rollouts[index], self.advantages[index], self.weights[index], old, ref)

    def cut(self, shards: int) -> list["Shard | None"]:
        """The virtual shards, None where one is empty."""
        parts = virtual_shards(range(len(self.rollouts)), shards)
        return [self.part(slice(part.start, part.stop)) if part else None for part in parts]


@dataclass(frozen=True)
class Scored:
    """What a micro-batch leaves behind: the trainer's logp [C], weighted loss and entropy of each token, and
    lost gradients.

    A pass over prompts leaves the last one only.
    """

    logp: torch.Tensor
    losses: list[float]
    entropies: list[float]
    underflow: dict[str, int]  # zeros in the gradients watched (underflow.py); empty unless asked for


@dataclass(frozen=True)
class ShardWork:
    """shard_gradient with everything but the shard: what a step hands to its workers. Picklable.

    loss: resolved, and multiplied by `scale`. watch: count the gradients that the compute dtype could not
    hold.
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

    Gradients are added to the weights' `main_grad`, prompts after their completions.
    """
    scored = []
    for index in prompt_passes([rollout.prompt_ids for rollout in shard.rollouts]):
        part = shard.part(index)
        underflow = PromptUnderflow() if work.watch else None
        with torch.set_grad_enabled(_has_gradient(part, work.loss)):
            prompts = Prompts(
                decoder, [r.prompt_ids for r in part.rollouts], underflow.hook if underflow else no_hook
            )
        if underflow:
            underflow.watch(prompts)
        for batch in micro_batches(len(part.rollouts), work.micro_batch):
            scored.append(
                _micro_batch_gradient(decoder, part.part(batch), prompts, prompts.of[batch], work, underflow)
            )
        prompts.backward()
        if underflow:
            scored.append(Scored(torch.empty(0), [], [], underflow.zeros))
    return scored


def _has_gradient(part: Shard, loss: LossConfig) -> bool:
    """Sequences without advantage have no policy gradient:

    those alone may be compared without being differentiated.
    """
    return bool(loss.square or loss.kl_coef or part.advantages.any())


def _micro_batch_gradient(
    decoder: Decoder,
    part: Shard,
    prompts: Prompts,
    after: Sequence[int],
    work: ShardWork,
    prompt_underflow: PromptUnderflow | None,
) -> Scored:
    """after: the prompt of each sequence, among `prompts`."""
    packed = pack([r.pair for r in part.rollouts], after)
    lengths = packed.completion_lengths
    tokens = torch.tensor(lengths)
    with torch.set_grad_enabled(_has_gradient(part, work.loss)):
        counter = Underflow(packed, prompt_underflow) if prompt_underflow else None
        hook = counter.hook if counter else no_hook
        # What follows the logprobs is small, and has one order of its sums on a CPU.
        logp, entropy = (x.cpu() for x in logprobs(decoder, packed, work.sampling_params, hook, prompts))
        sampling_logprobs = torch.from_numpy(np.concatenate([r.logprobs for r in part.rollouts]))
        old_logprobs = (
            logp.detach()
            if part.old_logprobs is None
            else torch.from_numpy(np.concatenate(part.old_logprobs))
        )
        ref_logprobs = (
            None if part.ref_logprobs is None else torch.from_numpy(np.concatenate(part.ref_logprobs))
        )
        A = torch.from_numpy(part.advantages).float().repeat_interleave(tokens)
        loss = policy_loss(logp, old_logprobs, sampling_logprobs, A, lengths, work.loss, ref_logprobs)
        loss = loss * torch.from_numpy(part.weights).float().repeat_interleave(tokens)
        if loss.requires_grad:
            if counter:
                counter.watch(logp)
            (loss.sum() * work.scale).backward()
    return Scored(logp.detach(), loss.detach().tolist(), entropy.tolist(), counter.zeros if counter else {})
