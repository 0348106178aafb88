"""The work of virtual shards: forward and backward of their prompts and completions, in micro-batches.

Shapes: n sequences in canonical order; C drawn tokens of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, zip_longest

import numpy as np
import torch

from ...kernels.sampling_params import SamplingParams
from ...kernels.shared_rows import ALL_ROWS, SharedRows
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
from .scored import Scored
from .underflow import OnePassUnderflow, PromptUnderflow, Underflow, ZeroCounts


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
        columns = {name: None if column is None else column[index] for name, column in vars(self).items()}
        return Shard(**columns)

    @property
    def critic(self) -> dict[str, Sequence[np.ndarray]]:
        """What a critic adds to the ledger, by name, [n][C] fp32 each; empty without one."""
        return {} if self.targets is None else {"values": self.old_values, "targets": self.targets}

    def whole_sequences(self) -> "Shard":
        """The same, where the forward of a sample begins with its first token, and no prompt is read before.

        A layer with a state needs it (model/prompts.py).
        """
        return replace(self, rollouts=[replace(r, turn_starts=(1,)) for r in self.rollouts])

    def cut(self, shards: int) -> list["Shard | None"]:
        """Cut the sequences into `shards` virtual shards; an empty shard is None."""
        parts = virtual_shards(range(len(self.rollouts)), shards)
        return [self.part(slice(part.start, part.stop)) if part else None for part in parts]


def _joined(shards: Sequence[Shard]) -> Shard:
    """The sequences of several shards, one shard after another."""
    columns = {name: [vars(shard)[name] for shard in shards] for name in vars(shards[0])}
    weights = np.concatenate(columns.pop("weights"))
    lists = {
        name: None if parts[0] is None else list(chain.from_iterable(parts))
        for name, parts in columns.items()
    }
    return Shard(weights=weights, **lists)


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
    shared: SharedRows = ALL_ROWS  # the ranks that share the rows of each forward, with all sequences each

    def __call__(
        self, decoder: Decoder, shards: Sequence[Shard | None], buffers: Buffers
    ) -> list[list[Scored] | None]:
        return shard_gradients(decoder, shards, buffers, self)

    def has_gradient(self, shard: Shard) -> bool:
        return has_gradient(shard, self.loss)

    def one_pass(self, model: CausalLM, shard: Shard, backward: bool) -> list[Scored]:
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
    if decoder.config.states and not decoder.numerics.prompts_once:
        shards = [shard and shard.whole_sequences() for shard in shards]
    passes = [
        [shard.part(index) for index in prompt_passes([r.prompt_ids for r in shard.rollouts])]
        if shard
        else []
        for shard in shards
    ]
    scored: list[list[Scored] | None] = [None if shard is None else [] for shard in shards]
    counts = ZeroCounts(work.shared) if work.watch else None
    for parts in zip_longest(*passes):
        together = {i: part for i, part in enumerate(parts) if part is not None}
        _pass_gradient(decoder, together, buffers, work, scored, counts)
    if counts is not None:  # read at the end, because the host waits for the backward
        parts = next(filter(None, scored))
        parts[-1] = replace(parts[-1], underflow=counts.read())
    return scored


def shard_in_one_pass(model: CausalLM, shard: Shard, work: ShardWork, backward: bool) -> list[Scored]:
    """Forward and, if asked for, backward of a virtual shard, its prompts included.

    The gradients are added to the .grad of the model's Parameters.
    """
    assert work.observer is None, "an observer sees a step in one process, with whole weights"
    if model.config.states:
        shard = shard.whole_sequences()
    prompt_ids = [r.prompt_ids for r in shard.rollouts]
    layout, masks = PromptLayout(prompt_ids), [r.mask for r in shard.rollouts]
    packed = pack([r.pair for r in shard.rollouts], layout.prompt_of_sample, None, masks)
    routing = _routing(model.config.experts, packed, shard.rollouts, work)
    inputs = model.inputs(packed, work.sampling_params, prompt_ids, routing or FREE, work.shared)
    counts = ZeroCounts(work.shared) if work.watch else None
    counter = OnePassUnderflow(packed, counts, layout, inputs.one_pass) if counts else None
    with torch.set_grad_enabled(backward):
        scores = model.score_inputs(inputs, counter.hook if counter else no_hook)
    scored = _backward(scores, _MicroBatch(shard, packed, inputs, routing), work, counter)
    return [scored if counts is None else replace(scored, underflow=counts.read())]


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
        prompts = Prompts(
            decoder, prompt_ids, hook, shard_of, observer, buffers, tables, routing, work.shared
        )
    for batch in batches:
        counter = Underflow(batch.packed, counts, underflow) if counts else None
        result = _micro_batch_gradient(decoder, batch, prompts, work, counter)
        for i, part in result.by_shard(batch.packed.shards, batch.packed.drawn_lengths):
            scored[i].append(part)
    prompts.backward()


@dataclass(frozen=True)
class _MicroBatch:
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
    how = {"routing": routing or FREE, "shared_rows": work.shared}
    inputs = ScoringInputs(decoder, packed, work.sampling_params, layout, **how)
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


def has_gradient(part: Shard, loss: LossConfig) -> bool:
    """Whether the loss of these sequences has a gradient.

    Tokens with advantage 0 have no policy gradient. Where all advantages are 0 and no other term of the
    loss has a gradient, the forward alone is enough: the monitor needs its logprobs.
    """
    has_other_terms = loss.square or loss.kl_coef or loss.router_aux_coef or part.targets is not None
    return bool(has_other_terms or any(A.any() for A in part.advantages))


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
    batch, routing = micro_batch.shard, micro_batch.routing
    lengths = micro_batch.packed.drawn_lengths
    with torch.set_grad_enabled(scores.logp.requires_grad):
        # What follows is small. It is computed on the CPU, where its sums have one order. So the host has to
        # wait once in a micro-batch: the backward begins with the gradient of this loss.
        given = [x for x in scores if x is not None]
        taken = [] if routing is None else [routing.taken()]
        logp, entropies, *rest = to_host(given, [counter] if counter else [], taken)
        values = None if scores.values is None else rest[0]
        experts = rest[-1] if taken else None
        loss = policy_loss(
            logp,
            logp.detach() if batch.old_logprobs is None else _concatenated(batch.old_logprobs),
            _concatenated([r.logprobs for r in batch.rollouts]),
            _concatenated(batch.advantages).float(),
            lengths,
            work.loss,
            _concatenated(batch.ref_logprobs),
            work.directory,
        )
        if batch.targets is not None:
            targets = _concatenated(batch.targets)
            loss = loss + value_loss(values, _concatenated(batch.old_values), targets, work.loss)
        loss = loss * torch.from_numpy(batch.weights).float().repeat_interleave(torch.tensor(lengths))
        balance = _load_balance(routing, experts, lengths, work.loss)
        total = loss.sum()
        if balance is not None:
            total = total + balance.sum() * (work.loss.router_aux_coef / work.sequences)
        if total.requires_grad:
            if counter:
                counter.watch(logp)
            (total * work.scale).backward()
    return Scored(
        logp.detach(),
        loss.detach(),
        entropies,
        experts,
        None if values is None else values.detach(),
        None if balance is None else balance.detach(),
    )


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
    sequences = zip(routing.logits().cpu().split(lengths), experts.split(lengths), strict=True)
    return torch.stack([load_balance(z, ids, routing.by_sigmoid) for z, ids in sequences])
