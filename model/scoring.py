"""Log-probabilities of drawn tokens: the trainer's side of every comparison.

Shapes: S sequences, T packed input tokens, C drawn tokens.

The row before a token predicts that token. So a sequence of p prompt tokens and c completion tokens has
p + c - 1 input rows, and the last c of them predict the completion. Where its prompt was read before
(prompts.py), the sequence has only these c rows. Tokens of a completion that nobody drew, as between two
turns, are inputs like the others, but the row before them is not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.attention_plan import KEY_TILE
from ..kernels.logprob import linear_logprob
from ..kernels.order import token_blocks
from ..kernels.passes import Pass
from ..kernels.sampling_params import SamplingParams
from ..kernels.shared_rows import ALL_ROWS, SharedRows, all_rows
from ..kernels.upload import Tables, upload_tables
from ..kernels.value_head import value_head
from .cache import BlockCache, CachedContext
from .context import NO_BUFFERS, Buffers, Hook, NarrowingContext, PackedContext, no_hook
from .decoder import Decoder, Forward, with_padding
from .observer import Rows
from .one_pass import OnePassContext, one_pass
from .prompts import PromptLayout, Prompts, SampleContext, SampleTables
from .routing import FREE, Routing
from .shared_context import SharedContext, SharedNarrowingContext, sizes_of_rank


@dataclass(frozen=True)
class PackedBatch:
    """Sequences packed for one forward. Build with `pack`."""

    ids: torch.Tensor  # [T] int64, inputs
    rows: torch.Tensor  # [C] int64, the input row that predicts each drawn token
    targets: torch.Tensor  # [C] int64
    lengths: tuple[int, ...]  # input tokens of each sequence, sums to T
    drawn_lengths: tuple[int, ...]  # drawn tokens of each sequence, sums to C
    # The prompt of each sequence, as an index into Prompts; None where no prompt was read before.
    after: tuple[int, ...] | None = None
    # The virtual shard of each sequence, in ascending order; None where all are of one.
    shards: tuple[int, ...] | None = None


def pack(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    after: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    masks: Sequence[np.ndarray] | None = None,
) -> PackedBatch:
    """Pack (prompt_ids, completion_ids) pairs.

    after: the prompt of each pair as an index into Prompts, where the prompts were read before. The first
    input token of a pair is then the prompt's last token.
    masks: which tokens of each completion were drawn, bool; without masks, all of them.

    Raises ValueError for an empty prompt or completion, or a mask of another length or without a drawn token,
    and names the pair.
    """
    ids, rows, targets, lengths, drawn_lengths = [], [], [], [], []
    for s, (prompt, completion) in enumerate(sequences):
        if not len(prompt) or not len(completion):
            raise ValueError(
                f"pack: sequence {s} has {len(prompt)} prompt and {len(completion)} completion tokens; "
                "it needs at least one of each"
            )
        inputs = [*(prompt if after is None else prompt[-1:]), *completion[:-1]]
        ids += inputs
        drawn = range(len(completion)) if masks is None else _drawn_places(masks[s], len(completion), s)
        rows += [len(ids) - len(completion) + i for i in drawn]
        targets += [completion[i] for i in drawn]
        lengths.append(len(inputs))
        drawn_lengths.append(len(drawn))
    tensors = (torch.tensor(x, dtype=torch.int64) for x in (ids, rows, targets))
    return PackedBatch(
        *tensors,
        tuple(lengths),
        tuple(drawn_lengths),
        None if after is None else tuple(after),
        None if shards is None else tuple(shards),
    )


def _drawn_places(mask: np.ndarray, length: int, sequence: int) -> list[int]:
    """The places in a completion of `length` tokens that its mask selects."""
    if len(mask) != length or not mask.any():
        raise ValueError(
            f"pack: the mask of sequence {sequence} has {len(mask)} entries, {int(np.sum(mask))} of them "
            f"true; it needs one for each of {length} completion tokens, and at least one true"
        )
    return np.flatnonzero(mask).tolist()


class Scores(NamedTuple):
    """What a forward gives of each drawn token, [C] fp32 each, on the decoder's device.

    logp and entropy are of the distribution that the tokens are drawn from. values: the critic's, of the ids
    before each token; None without a critic. logp and values are differentiable in the decoder's weights, the
    entropy is not.
    """

    logp: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor | None = None


class ScoringInputs:
    """What the forward of a batch reads beside the weights. `tables` go to the device before it.

    prompts: where the prompts lie, for a batch that `pack` was given `after` for. They need not be read yet.
    buffers: of the gradients, for a batch without prompts. routing: of the rows.
    shared [S]: the prompt of each sequence, which the same forward reads (one_pass.py), for a batch that
        `pack` was given `after` for.
    shared_rows: the ranks that share the rows; those of `prompts`, too.
    Raises ValueError for a sequence that is longer than the context, and for an id outside the vocabulary.
    """

    def __init__(
        self,
        decoder: Forward,
        batch: PackedBatch,
        sampling_params: SamplingParams,
        prompts: PromptLayout | None = None,
        buffers: Buffers = NO_BUFFERS,
        routing: Routing = FREE,
        shared: Sequence[Sequence[int]] | None = None,
        shared_rows: SharedRows = ALL_ROWS,
    ):
        _check_lengths(decoder, batch, PromptLayout(shared) if shared is not None else prompts)
        self.sampling_params = sampling_params
        if shared is not None:
            read = decoder, batch.ids, batch.lengths, shared, buffers, routing, shared_rows
            self._ids, self._context = one_pass(*read)
        else:
            self._ids, padding = with_padding(batch.ids, decoder, shared_rows.size)
            config = sizes_of_rank(decoder.config, shared_rows)
            self._context = (
                PackedContext(batch.lengths, config, padding, batch.shards, buffers, routing)
                if prompts is None
                else SampleTables(config, batch.lengths, prompts, batch.after, padding, batch.shards)
            )
        decoder.check_ids(self._ids)
        self._rows, self._targets, self._routing = batch.rows, batch.targets, routing
        self._shared_rows = shared_rows
        self._blocks = token_blocks(batch.drawn_lengths, batch.shards)  # of the drawn tokens
        self._chunks = [chunk for *_, chunk in self._blocks.chunks(decoder.logits_rows(sampling_params))]
        self._of_host = batch, self._context.positions[: len(batch.ids)]

    @property
    def tables(self) -> list[Tables]:
        """All that goes to the device."""
        return [*self._routing.tables, *self._context.tables, *self._chunks, self]

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        return [self._ids, self._rows, self._targets]

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._ids, self._rows, self._targets = tensors

    @property
    def one_pass(self) -> OnePassContext:
        """The context of a forward that reads the prompts too (shared)."""
        assert isinstance(self._context, OnePassContext)
        return self._context

    def observed_rows(self) -> Rows:
        """The rows that an observer is shown."""
        batch, positions = self._of_host
        lengths = torch.tensor(batch.lengths)
        sequences = torch.arange(len(lengths)).repeat_interleave(lengths)
        return Rows(batch.ids, sequences, positions, batch.rows)

    def forward(self, decoder: Forward, hook: Hook = no_hook, prompts: Prompts | None = None) -> Scores:
        """The scores of the drawn tokens. prompts: those of the layout, which were read."""
        context = self._context if prompts is None else SampleContext(self._context, prompts, self._routing)
        ids, shared = self._ids, self._shared_rows
        if shared.size > 1:
            narrows = isinstance(context, NarrowingContext)
            context = (SharedNarrowingContext if narrows else SharedContext)(context, shared)
            ids = shared.mine(ids)
        # No row occurs twice, so the gradient of each is written once and nothing is added up.
        h = all_rows(decoder.hidden(ids, context, hook), shared)[self._rows]
        values = None
        if decoder.value_head is not None:
            head_pass = Pass(self._blocks, context.in_pass.buffers, shared=shared)
            values, h = value_head(h, decoder.value_head, head_pass)
        lm_head, buffers = decoder.logits_weight_and_buffers(context.in_pass.buffers)
        logp, entropy = linear_logprob(
            h.to(lm_head.dtype),
            lm_head,
            self._targets,
            self.sampling_params,
            Pass(self._blocks, buffers, shared=shared),
            decoder.numerics.tiles,
            decoder.config.head.cap,
            decoder.numerics.leaves,
        )
        hook("logprob", logp)
        return Scores(logp, entropy, values)


def _check_lengths(decoder: Forward, batch: PackedBatch, prompts: PromptLayout | None) -> None:
    """Raise ValueError for a sequence that is longer than the context."""
    read_before = [0] * len(batch.lengths)
    if prompts is not None:
        read_before = prompts.lengths[list(batch.after)].tolist()
    longest = max(read + length for read, length in zip(read_before, batch.lengths, strict=True))
    if longest > decoder.config.max_positions:
        raise ValueError(
            f"logprobs: a sequence of {longest} tokens is longer than the context "
            f"({decoder.config.max_positions})"
        )


def logprobs(
    decoder: Decoder,
    batch: PackedBatch,
    sampling_params: SamplingParams,
    hook: Hook = no_hook,
    prompts: Prompts | None = None,
    buffers: Buffers = NO_BUFFERS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logp and entropy of the drawn tokens, [C] each. See `scores`."""
    return scores(decoder, batch, sampling_params, hook, prompts, buffers)[:2]


def scores(
    decoder: Decoder,
    batch: PackedBatch,
    sampling_params: SamplingParams,
    hook: Hook = no_hook,
    prompts: Prompts | None = None,
    buffers: Buffers = NO_BUFFERS,
) -> Scores:
    """The scores of the drawn tokens (see Scores).

    hook: see Decoder.hidden. The last operation is `logprob` [C].
    prompts: the prompts that were read before, for a batch that `pack` was given `after` for. They change no
        bit.
    buffers: where the gradients of the weights are summed; with prompts, `prompts.buffers` are taken.

    Raises ValueError for a sequence that is longer than the context, and for an id outside the vocabulary.
    """
    inputs = ScoringInputs(decoder, batch, sampling_params, prompts, buffers)
    upload_tables(decoder.device, inputs.tables)
    return inputs.forward(decoder, hook, prompts)


@torch.no_grad()
def cached_scores(
    decoder: Decoder,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    sampling_params: SamplingParams,
    chunk: int,
) -> list[torch.Tensor]:
    """logp of each pair's completion, on the CPU, computed through the key-value cache.

    The cache reads `chunk` tokens of each sequence at a time; 1 is decoding.
    """
    inputs = [[*prompt, *completion[:-1]] for prompt, completion in pairs]
    blocks_needed = [-(-len(ids) // KEY_TILE) for ids in inputs]
    cache = BlockCache(
        decoder.config,
        sum(blocks_needed),
        decoder.cache_dtype,
        decoder.device,
        slots=len(pairs),
        compute=decoder.dtype,
    )
    slots = [cache.take_slot() for _ in pairs]
    blocks = [cache.allocate(n) for n in blocks_needed]
    hidden: list[list[torch.Tensor]] = [[] for _ in pairs]
    for start in range(0, max(map(len, inputs)), chunk):
        active = [i for i, ids in enumerate(inputs) if len(ids) > start]
        chunks = [inputs[i][start : start + chunk] for i in active]
        lengths = [len(ids) for ids in chunks]
        context = CachedContext(
            cache,
            lengths,
            [start] * len(active),
            [blocks[i] for i in active],
            slots=[slots[i] for i in active],
        )
        rows = decoder.hidden(torch.tensor([token for ids in chunks for token in ids]), context)
        for i, sequence_rows in zip(active, rows.split(lengths), strict=True):
            hidden[i].append(sequence_rows)
    parts, lm_head = [], decoder.logits_weight()
    order = decoder.numerics
    how = {"tiles": order.tiles, "cap": decoder.config.head.cap, "leaves": order.leaves}
    for (_, completion), rows in zip(pairs, hidden, strict=True):
        h = torch.cat(rows)[-len(completion) :]
        targets = torch.tensor(completion, device=h.device)
        logp, _ = linear_logprob(h.to(lm_head.dtype), lm_head, targets, sampling_params, **how)
        parts.append(logp.cpu())
    return parts
