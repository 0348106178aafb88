"""The work of virtual shards: forward and backward of their prompts and completions, in micro-batches.

Shapes: n sequences in canonical order; C drawn tokens of a micro-batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress, groupby, zip_longest
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.sampling_params import SamplingParams
from ...kernels.to_host import to_host
from ...model.causal_lm import CausalLM
from ...model.context import Buffers, Hook, no_hook
from ...model.decoder import Decoder
from ...model.observer import Observer, Rows, observed
from ...model.prompts import PromptLayout, Prompts, prompt_passes
from ...model.routing import FREE, RecordedRouting, ReplayedRouting, Routing
from ...model.scoring import PackedBatch, Scores, ScoringInputs, pack
from ...model.sizes import Experts
from ..rollout.types import Rollout
from .losses.critic import value_loss
from .losses.load_balance import load_balance
from .losses.policy_loss import LossConfig, policy_loss
from .parallel.partition import micro_batches, virtual_shards
from .underflow import WATCHED, OnePassUnderflow, PromptUnderflow, Underflow, ZeroCounts


@dataclass(frozen=True)
class Shard:
    """Consecutive sequences of a step, or all of them, with what the loss needs."""

    rollouts: Sequence[Rollout]  # [n]
    advantages: Sequence[np.ndarray]  # [n][C] fp64, of each drawn token
    weights: np.ndarray  # [n], of the loss
    # [n][C], the trainer's logprobs with the weights that were sampled from. None where the trainer still has
    # these weights.
    old_logprobs: Sequence[np.ndarray] | None = None
    ref_logprobs: Sequence[np.ndarray] | None = None  # [n][C], the reference's; None without a KL term
    # [n][C] fp32, the critic's with the weights that were sampled from, and what it learns; None without one.
    old_values: Sequence[np.ndarray] | None = None
    targets: Sequence[np.ndarray] | None = None

    def part(self, index: slice) -> "Shard":
        """The sequences that `index` selects."""
        optional = (None if column is None else column[index] for column in self._optional)
        return Shard(self.rollouts[index], self.advantages[index], self.weights[index], *optional)

    @property
    def critic(self) -> dict[str, Sequence[np.ndarray]]:
        """What a critic adds to the ledger, by name, [n][C] fp32 each; empty without one."""
        return {} if self.targets is None else {"values": self.old_values, "targets": self.targets}

    @property
    def _optional(self) -> tuple[Sequence[np.ndarray] | None, ...]:
        """The columns that not every loss has, in the order of the fields."""
        return self.old_logprobs, self.ref_logprobs, self.old_values, self.targets

    def cut(self, shards: int) -> list["Shard | None"]:
        """Cut the sequences into `shards` virtual shards; an empty shard is None."""
        parts = virtual_shards(range(len(self.rollouts)), shards)
        return [self.part(slice(part.start, part.stop)) if part else None for part in parts]


def _joined(shards: Sequence[Shard]) -> Shard:
    """The sequences of several shards, one shard after another."""

    def joined(column: tuple[Sequence[np.ndarray] | None, ...]) -> list[np.ndarray] | None:
        return None if column[0] is None else list(chain.from_iterable(column))

    return Shard(
        list(chain.from_iterable(shard.rollouts for shard in shards)),
        list(chain.from_iterable(shard.advantages for shard in shards)),
        np.concatenate([shard.weights for shard in shards]),
        *map(joined, zip(*(shard._optional for shard in shards), strict=True)),
    )


@dataclass(frozen=True)
class Scored:
    """What a shard's sequences of a micro-batch leave behind.

    One of a call's has only `underflow`, of all its passes; the rest is empty. The others have zeros there.
    """

    logp: torch.Tensor  # [C], the trainer's
    losses: torch.Tensor  # [C], weighted
    entropies: torch.Tensor  # [C]
    # [C, L, k], the experts of the row that predicts each token (model/routing.py); None in a dense model
    experts: torch.Tensor | None
    underflow: dict[str, int]  # zeros in the watched gradients (underflow.py); empty unless ShardWork.watch
    values: torch.Tensor | None = None  # [C], the critic's; None without one
    load_balance: torch.Tensor | None = None  # of each sequence (losses/load_balance.py); None: it is off


def mean_load_balance(parts: Sequence[Scored]) -> dict[str, float]:
    """The metric of the load-balancing loss: its mean over sequences. Nothing where it is off."""
    of_parts = [part.load_balance for part in parts if part.load_balance is not None]
    values = torch.cat(of_parts).tolist() if of_parts else []
    return {"router/load_balance": math.fsum(values) / len(values)} if values else {}


def joined_experts(parts: Sequence[Scored]) -> torch.Tensor | None:
    """The experts of the tokens of all parts, [C, L, k]; None in a dense model."""
    of_parts = [part.experts for part in parts if part.experts is not None]
    return torch.cat(of_parts) if of_parts else None


# Called before each forward with its ids, places and predicting rows (see StepObserver.forward).
ForwardObserver = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Hook]


@dataclass(frozen=True)
class ShardWork:
    """shard_gradients and its arguments except the shards. A step hands it to its workers: it is picklable.

    loss: resolved. directory: where a surrogate of the user's is looked up. The loss is multiplied by
    `scale`. watch: count the gradients that the compute dtype could not hold. observer: is shown each
    forward, in this process; only a step with one worker may have it.
    """

    sampling_params: SamplingParams
    loss: LossConfig
    micro_batch: int
    directory: str = ""
    scale: float = 1.0
    watch: bool = False
    observer: ForwardObserver | None = None
    replayed: bool = False  # whether every row is computed with the sampler's experts
    sequences: int = 1  # of the step, over which the load-balancing loss is a mean

    def __call__(
        self, decoder: Decoder, shards: Sequence[Shard | None], buffers: Buffers
    ) -> list[list[Scored] | None]:
        """See shard_gradients."""
        return shard_gradients(decoder, shards, buffers, self)

    def has_gradient(self, shard: Shard) -> bool:
        """See has_gradient."""
        return has_gradient(shard, self.loss)

    def one_pass(self, model: CausalLM, shard: Shard, backward: bool) -> list[Scored]:
        """See shard_in_one_pass."""
        return shard_in_one_pass(model, shard, self, backward)


def shard_gradients(
    decoder: Decoder, shards: Sequence[Shard | None], buffers: Buffers, work: ShardWork
) -> list[list[Scored] | None]:
    """Forward and backward of some virtual shards, work.micro_batch sequences at a time.

    A forward may hold sequences of several shards. Gradients are added to the weights' buffers,
    separately for each shard. In a shard's sum, those of a pass's completions come first, then those of its
    prompts. So the shards beside it decide no bit of its sum. Returns a list for each shard; None for an
    empty one.
    """
    passes = [
        [shard.part(index) for index in prompt_passes([r.prompt_ids for r in shard.rollouts])]
        if shard
        else []
        for shard in shards
    ]
    scored: list[list[Scored] | None] = [None if shard is None else [] for shard in shards]
    counts = ZeroCounts() if work.watch else None
    for parts in zip_longest(*passes):
        together = {i: part for i, part in enumerate(parts) if part is not None}
        _pass_gradient(decoder, together, buffers, work, scored, counts)
    if counts is not None:  # read at the end, because the host waits for the backward
        next(filter(None, scored)).append(Scored(*[torch.empty(0)] * 3, None, counts.read()))
    return scored


def shard_in_one_pass(model: CausalLM, shard: Shard, work: ShardWork, backward: bool) -> list[Scored]:
    """Forward and, if asked for, backward of a virtual shard, its prompts included.

    The gradients are added to the .grad of the model's Parameters.
    """
    assert work.observer is None, "an observer sees a step in one process, with whole weights"
    prompt_ids = [r.prompt_ids for r in shard.rollouts]
    layout, masks = PromptLayout(prompt_ids), [r.mask for r in shard.rollouts]
    packed = pack([r.pair for r in shard.rollouts], layout.prompt_of_sample, None, masks)
    routing = _routing(model.config.experts, packed, shard.rollouts, work)
    inputs = model.inputs(packed, work.sampling_params, prompt_ids, routing or FREE)
    counts = ZeroCounts() if work.watch else None
    counter = OnePassUnderflow(packed, counts, layout, inputs.one_pass) if counts else None
    with torch.set_grad_enabled(backward):
        scores = model.score_inputs(inputs, counter.hook if counter else no_hook)
    scored = [_backward(scores, _MicroBatch(shard, packed, inputs, routing), work, counter)]
    if counts is not None:
        scored.append(Scored(*[torch.empty(0)] * 3, None, counts.read()))
    return scored


def _pass_gradient(
    decoder: Decoder,
    parts: dict[int, Shard],
    buffers: Buffers,
    work: ShardWork,
    scored: list[list[Scored] | None],
    counts: ZeroCounts | None,
) -> None:
    """Forward and backward of one pass of some shards, by the index of the shard.

    Adds to `scored`, and to the counts of underflow.
    """
    joined = _joined(list(parts.values()))
    shard_of = [i for i, part in parts.items() for _ in part.rollouts]  # the shard of each sequence
    prompt_ids = [r.prompt_ids for r in joined.rollouts]
    layout = PromptLayout(prompt_ids, shard_of)
    batches = [
        _micro_batch(decoder, joined, rows, layout, shard_of, work)
        for rows in micro_batches(len(shard_of), work.micro_batch)
    ]
    underflow = PromptUnderflow(layout, counts) if counts else None
    hook = underflow.hook if underflow else no_hook
    with torch.set_grad_enabled(has_gradient(joined, work.loss)):
        observer = _placed(work.observer, joined.rollouts)
        tables = [table for batch in batches for table in batch.inputs.tables]
        routing = _routing_of_prompts(decoder.config.experts, layout, joined.rollouts, work)
        prompts = Prompts(decoder, prompt_ids, hook, shard_of, observer, buffers, tables, routing)
    for batch in batches:
        counter = Underflow(batch.packed, counts, underflow) if counts else None
        result = _micro_batch_gradient(decoder, batch, prompts, work, counter)
        for i, part in _by_shard(result, batch.packed.shards, batch.packed.drawn_lengths):
            scored[i].append(part)
    prompts.backward()


class _MicroBatch(NamedTuple):
    """Sequences of one forward, ready for it: what it reads goes to the device with the pass's prompts."""

    shard: Shard  # the sequences
    packed: PackedBatch
    inputs: ScoringInputs
    routing: RecordedRouting | None  # None in a dense model


def _micro_batch(
    decoder: Decoder,
    joined: Shard,
    rows: slice,
    layout: PromptLayout,
    shard_of: Sequence[int],
    work: ShardWork,
) -> _MicroBatch:
    """The micro-batch of the sequences `rows` of a pass. layout: of the pass's prompts."""
    shard = joined.part(rows)
    pairs, masks = [r.pair for r in shard.rollouts], [r.mask for r in shard.rollouts]
    packed = pack(pairs, layout.prompt_of_sample[rows], shard_of[rows], masks)
    routing = _routing(decoder.config.experts, packed, shard.rollouts, work)
    inputs = ScoringInputs(decoder, packed, work.sampling_params, layout, routing=routing or FREE)
    return _MicroBatch(shard, packed, inputs, routing)


def _routing(
    experts: Experts | None, packed: PackedBatch, rollouts: Sequence[Rollout], work: ShardWork
) -> RecordedRouting | None:
    """The routing of a micro-batch; None in a dense model."""
    keeps_logits = bool(work.loss.router_aux_coef)
    if experts is None or not work.replayed:
        return experts and RecordedRouting(experts, packed.rows, keeps_logits)
    # A sequence's rows begin with the prompt's last token.
    given = np.concatenate([r.experts[len(r.prompt_ids) - 1 :] for r in rollouts])
    return ReplayedRouting(experts, torch.from_numpy(given), packed.rows, keeps_logits)


def _routing_of_prompts(
    experts: Experts | None, layout: PromptLayout, rollouts: Sequence[Rollout], work: ShardWork
) -> Routing:
    """The routing of a pass's prompts. A replayed prompt has the experts of its first sample in the shard."""
    if experts is None or not work.replayed:
        return FREE
    given = [r.experts[: len(r.prompt_ids) - 1] for r in compress(rollouts, layout.firsts)]
    return ReplayedRouting(experts, torch.from_numpy(np.concatenate(given)))


def _placed(observer: ForwardObserver | None, rollouts: Sequence[Rollout]) -> Observer | None:
    """An observer of forwards over `rollouts`, which tells `observer` the place of each row."""
    if observer is None:
        return None
    samples = torch.tensor([(r.prompt, r.sample) for r in rollouts])

    def forward(rows: Rows) -> Hook:
        places = torch.column_stack([samples[rows.sequences], rows.positions])
        return observer(rows.ids, places, rows.predicting)

    return forward


def _by_shard(
    micro_batch: Scored, shard_of: Sequence[int], lengths: Sequence[int]
) -> Iterator[tuple[int, Scored]]:
    """The parts of a micro-batch that belong to one shard each.

    shard_of [n]: the shard of each sequence. lengths [n]: its drawn tokens.
    """
    start = 0
    for shard, group in groupby(range(len(shard_of)), key=shard_of.__getitem__):
        members = list(group)
        end = start + sum(lengths[i] for i in members)
        tokens = slice(start, end)
        # Copies, because a part of a tensor is pickled with all of it.
        columns = (micro_batch.logp, micro_batch.losses, micro_batch.entropies)
        experts, values = (
            None if x is None else x[tokens].clone() for x in (micro_batch.experts, micro_batch.values)
        )
        balance = micro_batch.load_balance
        balance = None if balance is None else balance[members[0] : members[-1] + 1].clone()
        of_tokens = (x[tokens].clone() for x in columns)
        yield shard, Scored(*of_tokens, experts, micro_batch.underflow, values, balance)
        start = end


def has_gradient(part: Shard, loss: LossConfig) -> bool:
    """Whether the loss of these sequences has a gradient.

    Tokens with advantage 0 have no policy gradient. Where all advantages are 0 and no other term of the
    loss has a gradient, the forward alone is enough: the monitor needs its logprobs.
    """
    of_others = loss.square or loss.kl_coef or loss.router_aux_coef or part.targets is not None
    return bool(of_others or any(A.any() for A in part.advantages))


def _concatenated(values: Sequence[np.ndarray] | None) -> torch.Tensor | None:
    """The values of the tokens of all sequences in one tensor [C]."""
    return None if values is None else torch.from_numpy(np.concatenate(values))


def _micro_batch_gradient(
    decoder: Decoder, micro_batch: _MicroBatch, prompts: Prompts, work: ShardWork, counter: Underflow | None
) -> Scored:
    """Forward and backward of the drawn tokens of a micro-batch."""
    batch, inputs = micro_batch.shard, micro_batch.inputs
    with torch.set_grad_enabled(has_gradient(batch, work.loss)):
        hook = counter.hook if counter else no_hook
        observer = _placed(work.observer, batch.rollouts)
        if observer is not None:
            hook = observed(observer, inputs.observed_rows(), hook)
        scores = inputs.forward(decoder, hook, prompts)
    return _backward(scores, micro_batch, work, counter)


def _backward(scores: Scores, micro_batch: _MicroBatch, work: ShardWork, counter: Underflow | None) -> Scored:
    """The loss of a forward, and its backward where the scores have a graph."""
    batch, packed, _, routing = micro_batch
    lengths = packed.drawn_lengths
    tokens = torch.tensor(lengths)
    with torch.set_grad_enabled(scores.logp.requires_grad):
        # What follows is small. It is computed on the CPU, where its sums have one order. So the host has to
        # wait once in a micro-batch: the backward begins with the gradient of this loss.
        given = [x for x in scores if x is not None]
        others = [] if routing is None else [routing.taken()]
        logp, entropy, *rest = to_host(given, [counter] if counter else [], others)
        values, experts = rest[: len(given) - 2], rest[-1] if others else None
        sampling_logprobs = _concatenated([r.logprobs for r in batch.rollouts])
        old_logprobs = logp.detach() if batch.old_logprobs is None else _concatenated(batch.old_logprobs)
        ref_logprobs = _concatenated(batch.ref_logprobs)
        A = _concatenated(batch.advantages).float()
        of_tokens = logp, old_logprobs, sampling_logprobs, A
        loss = policy_loss(*of_tokens, lengths, work.loss, ref_logprobs, work.directory)
        if batch.targets is not None:
            of_critic = _concatenated(batch.old_values), _concatenated(batch.targets)
            loss = loss + value_loss(*values, *of_critic, work.loss)
        loss = loss * torch.from_numpy(batch.weights).float().repeat_interleave(tokens)
        balance = _load_balance(routing, experts, lengths, work.loss)
        total = loss.sum()
        if balance is not None:
            total = total + balance.sum() * (work.loss.router_aux_coef / work.sequences)
        if total.requires_grad:
            if counter:
                counter.watch(logp)
            (total * work.scale).backward()
    underflow = dict.fromkeys(WATCHED, 0) if counter else {}
    of_critic = values[0].detach() if values else None
    balance = None if balance is None else balance.detach()
    of_tokens = logp.detach(), loss.detach(), entropy
    return Scored(*of_tokens, experts, underflow, of_critic, balance)


def _load_balance(
    routing: RecordedRouting | None,
    experts: torch.Tensor | None,
    lengths: Sequence[int],
    loss: LossConfig,
) -> torch.Tensor | None:
    """The load-balancing loss of each sequence, [n] on the CPU; None where it is off.

    experts [C, L, k], on the CPU. lengths: drawn tokens.
    """
    if routing is None or not loss.router_aux_coef:
        return None
    of_sequences = zip(routing.logits().cpu().split(lengths), experts.split(lengths), strict=True)
    return torch.stack([load_balance(z, ids) for z, ids in of_sequences])
