"""Prompts that are computed once for all their samples, in training as in sampling.

Forward: one forward reads all tokens of each prompt but the last, and keeps their keys and values in every
layer. A sample begins with the prompt's last token and attends to these keys and values. A row depends on the
rows before it only, so all rows have the same bits as in whole sequences.

Backward: each sample adds its gradient of these keys and values to fp32 buffers. When all samples have done
so, the sums are rounded once to the compute dtype and go through the prompts.

A gated delta net keeps what each prompt leaves (kernels/recurrent_state.py::Left) in place of keys and
values, where numerics.prompts_once is set. Its gradient goes the same way. Else such a model reads no prompt
once.

Order: the samples of a prompt one after another, in canonical order. A weight's gradient takes the samples of
a pass first, then the prompts of the pass. Which prompts share a pass depends on their lengths only
(`prompt_passes`), so no bit depends on the micro-batch.

Shapes: n samples of N prompts; B tokens of these prompts, without the last token of each; S samples and T
tokens of one forward; D width of a head.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import compress

import numpy as np
import torch

from ..kernels.attention import attention, varlen_plan
from ..kernels.attention_rule import AttentionRule
from ..kernels.embedding import RowIds, read_rows
from ..kernels.grad import GradBuffer
from ..kernels.order import token_blocks
from ..kernels.passes import Pass
from ..kernels.recurrent_state import Left, Segments
from ..kernels.shared_rows import ALL_ROWS, SharedRows
from ..kernels.upload import Tables, upload_tables
from .config import ModelConfig
from .context import NO_BUFFERS, Buffers, CarryingContext, Hook, PackedContext, WholeSequences, no_hook
from .decoder import Decoder, with_padding
from .observer import Observer, Rows, observed
from .routing import FREE, Routing
from .shared_context import SharedContext, sizes_of_rank

# Tokens of the prompts of one pass, at most; a longer prompt has a pass of its own. It must stay constant,
# because it orders the weights' gradients.
PASS_TOKENS = 512


def first_of_prompt(prompts: Sequence[Sequence[int]], shards: Sequence[int] | None = None) -> list[bool]:
    """Whether each of n samples is the first of its prompt, and with `shards` of its prompt in its shard.

    prompts [n]: the prompt of each sample. Equal prompts lie side by side.
    """
    shards = [0] * len(prompts) if shards is None else shards
    keys = list(zip(shards, prompts, strict=True))
    return [i == 0 or key != keys[i - 1] for i, key in enumerate(keys)]


def prompt_passes(prompts: Sequence[Sequence[int]]) -> list[slice]:
    """Slices of the samples whose prompts are read together.

    prompts [n]: the prompt of each sample. Equal prompts lie side by side.
    """
    passes, start, tokens = [], 0, 0
    for i, (prompt, first) in enumerate(zip(prompts, first_of_prompt(prompts), strict=True)):
        if i and first and tokens + len(prompt) > PASS_TOKENS:
            passes.append(slice(start, i))
            start, tokens = i, 0
        tokens += len(prompt) if first else 0
    return [*passes, slice(start, len(prompts))] if len(prompts) else []


class PromptLayout:
    """Where the prompts of n samples lie in the forward that reads them: what is known before it.

    prompts [n]: the prompt of each sample. Equal prompts lie side by side.
    shards [n]: the virtual shard of each sample, where the pass holds several. A prompt with samples in two
    shards is read once for each of them, because each shard sums its own gradient.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], shards: Sequence[int] | None = None):
        """Raises ValueError for an empty prompt."""
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(
                    f"prompts: prompt {i} is empty; a completion needs at least one token before it"
                )
        self.firsts = first_of_prompt(prompts, shards)  # [n]
        self.prompt_of_sample = tuple((np.cumsum(self.firsts) - 1).tolist())  # [n]
        self.lengths = np.array([len(prompt) - 1 for prompt in compress(prompts, self.firsts)])  # [N]
        self.starts = np.cumsum(self.lengths) - self.lengths  # [N], in B


def whole_sequences(layout: PromptLayout) -> None:
    """Raise ValueError unless every prompt has one token: then the rows of a sample are a whole sequence."""
    if layout.lengths.any():
        raise ValueError(
            "prompts: a model with a gated delta net reads a prompt once for its samples only where "
            "precision.state_prompts says so, and not in one pass; give each sample its whole sequence, "
            "after a prompt of its first token"
        )


class Prompts(PromptLayout):
    """The prompts of n samples, read by one forward."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        hook: Hook = no_hook,
        shards: Sequence[int] | None = None,
        observer: Observer | None = None,
        buffers: Buffers = NO_BUFFERS,
        tables: Sequence[Tables] = (),
        routing: Routing = FREE,
        shared: SharedRows = ALL_ROWS,
    ):
        """prompts and shards: see PromptLayout. `hook`: see Decoder.hidden. routing: of the rows, which are
        the tokens of each prompt but the last, prompt by prompt.

        observer: its rows are of the n samples. buffers: where the gradients of the weights are summed, by
        the prompts and by their samples. tables: what the samples read, which goes to the device by the same
        copy as the prompts. shared: the ranks that share the rows, of the prompts and of their samples; `kv`
        has this rank's heads. Raises ValueError for an empty prompt, and where a layer keeps a state and
        numerics.prompts_once is not set for one of more tokens than one (whole_sequences).
        """
        super().__init__(prompts, shards)
        if decoder.config.states and not decoder.numerics.prompts_once:
            whole_sequences(self)
        self.buffers, self.shared, self.states = buffers, shared, decoder.config.states
        ids = [token for prompt in compress(prompts, self.firsts) for token in prompt[:-1]]
        if observer is not None and ids:
            first_samples = np.repeat(np.flatnonzero(self.firsts), self.lengths)
            positions = ranges(np.zeros_like(self.lengths), self.lengths)
            columns = map(torch.from_numpy, (first_samples, positions))
            rows = Rows(torch.tensor(ids), *columns, torch.empty(0, dtype=torch.int64))
            hook = observed(observer, rows, hook)
        if shards is not None:
            firsts_and_lengths = zip(compress(shards, self.firsts), self.lengths, strict=True)
            shards = [shard for shard, n in firsts_and_lengths if n]
        lengths = [n for n in self.lengths.tolist() if n]
        if ids:
            read = _read(decoder, ids, lengths, hook, shards, buffers, tables, routing, shared)
        else:  # every prompt has one token
            read = {}, {}
            upload_tables(decoder.device, tables)
        self._collected: list[tuple[torch.Tensor, GradBuffer]] = []
        # The keys and values that the samples attend to, [B, 2 Hkv D], or what the prompts leave, by layer.
        # They are leaves, and their gradient is in fp32.
        self.kv_buffers: dict[torch.Tensor, GradBuffer] = {}
        self.kv = {layer: self._leaf(kv) for layer, kv in read[0].items()}
        self.left = {layer: Left(*map(self._leaf, left)) for layer, left in read[1].items()}

    def _leaf(self, read: torch.Tensor) -> torch.Tensor:
        """What was read, cut off from the forward of the prompts, with a buffer of its gradient."""
        leaf = read.detach().requires_grad_(read.requires_grad)
        if read.requires_grad:
            self.kv_buffers[leaf] = GradBuffer.like(leaf)
            self._collected.append((read, self.kv_buffers[leaf]))
        return leaf

    def backward(self) -> None:
        """Send the collected gradients of the keys and values through the prompts, to the weights.

        Call it after the backward of all samples. Nothing happens where the prompts were read without
        gradients.
        """
        # The keys of a first layer whose weights are all frozen have no gradient.
        if self._collected:
            read, buffers = zip(*self._collected, strict=True)
            _CollectedGradients.apply(buffers, *read).backward()


class _CollectedGradients(torch.autograd.Function):
    """A scalar. Its gradient with respect to what was read is what the buffers have collected.

    torch.autograd.backward takes gradients too. But it imports sympy for it (torch 2.13), which costs each
    worker 0.3 s and 36 MB.
    """

    @staticmethod
    def forward(ctx, buffers, *read):
        ctx.buffers, ctx.dtypes = buffers, [x.dtype for x in read]
        return read[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        pairs = zip(ctx.buffers, ctx.dtypes, strict=True)
        return None, *(buffer.zeroed([0])[0].to(dtype) for buffer, dtype in pairs)


def _read(
    decoder: Decoder,
    ids: list[int],
    lengths: list[int],
    hook: Hook,
    shards: list[int] | None,
    buffers: Buffers,
    tables: Sequence[Tables],
    routing: Routing,
    shared: SharedRows,
) -> tuple[dict[int, torch.Tensor], dict[int, Left]]:
    """Keys and values of packed tokens, [B, 2 Hkv D], and what they leave, by layer; see Prompts."""
    padded_ids, padding = with_padding(torch.tensor(ids), decoder, shared.size)
    config = sizes_of_rank(decoder.config, shared)
    context = _PromptContext(lengths, config, decoder.dtype, padding, shards, buffers, routing)
    decoder.check_ids(padded_ids)
    all_tables = [*context.tables, *routing.tables, *tables]
    (padded_ids,) = upload_tables(decoder.device, all_tables, padded_ids)
    if shared.size == 1:
        decoder.read(padded_ids, context, hook)
    else:
        decoder.read(shared.mine(padded_ids), SharedContext(context, shared), hook)
    return context.kv, context.left


class _PromptContext(PackedContext, CarryingContext):
    """Whole sequences, of which kv[layer] [B, 2 Hkv D] keeps the keys and values, without padding rows.

    left[layer]: what the prompts leave, each tensor [N + 1, ...] flat, the last of which is of no prompt.
    """

    def __init__(self, lengths: list[int], config: ModelConfig, dtype: torch.dtype, *args):
        super().__init__(lengths, config, *args)
        self._dtype = dtype
        self.kv: dict[int, torch.Tensor] = {}
        self.left: dict[int, Left] = {}
        self._tokens, self._prompts, self._config = sum(lengths), len(lengths), config

    def keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._keep(self._config.layers - 1, k, v)

    def _keep(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        B = self._tokens
        self.kv[layer] = torch.stack([k[:B], v[:B]], dim=1).view(B, -1)

    def before(self, layer: int) -> Left:
        return Left.nothing(self._config.states[layer], len(self._lengths), self._dtype)

    def leave(self, layer: int, left: Left) -> None:
        if layer not in self.left:  # else a backward computes the layer again
            N = self._prompts
            flat = (x[:N].flatten(1) for x in left)
            self.left[layer] = Left(*(torch.cat([x, x.new_zeros(1, x.shape[1])]) for x in flat))

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        rule: AttentionRule,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if layer not in self.kv:
            self._keep(layer, k, v)
        return super().attend(layer, q, k, v, scale, rule, sinks)


class SampleTables:
    """Where samples continue their prompts: what is known before the prompts are read.

    A sample's rows begin with the prompt's last token. All rows are packed, and padding rows follow as in
    PackedContext.

    lengths [S]: rows of each sample.
    layout: of the prompts. after [S]: the prompt of each sample, as an index into them.
    shards [S]: the virtual shard of each sample, where the pass holds several.
    """

    def __init__(
        self,
        config: ModelConfig,
        lengths: Sequence[int],
        layout: PromptLayout,
        after: Sequence[int],
        padding: int = 0,
        shards: Sequence[int] | None = None,
    ):
        rows, prompt_of_sample = np.array(lengths), list(after)
        prompt_rows, prompt_starts = (x[prompt_of_sample] for x in (layout.lengths, layout.starts))
        if padding:  # one more sequence, without a prompt
            rows, prompt_rows, prompt_starts = (
                np.append(x, n) for x, n in ((rows, padding), (prompt_rows, 0), (prompt_starts, 0))
            )
        self._layout, self._rows, self._after = layout, rows.tolist(), list(after)
        self._before = prompt_rows.tolist()
        self.blocks = token_blocks(lengths, shards)
        self.positions = torch.from_numpy(ranges(prompt_rows, rows))
        self.prompt_rows = RowIds(torch.from_numpy(ranges(prompt_starts, prompt_rows)))
        # Attention takes the keys of each sequence side by side: the rows of its prompt, copied for each
        # sample, then the sample's rows.
        starts = np.cumsum(prompt_rows + rows) - (prompt_rows + rows)
        places = np.concatenate([ranges(starts, prompt_rows), ranges(starts + prompt_rows, rows)])
        inverse = torch.from_numpy(places)
        self.order = inverse.argsort(), inverse
        self.plan = varlen_plan(rows.tolist(), config.heads, config.kv_heads, prompt_rows.tolist())
        self._has_states = bool(config.states)

    @cached_property
    def segments(self) -> Segments:
        """The rows of the samples and of padding, for layers with a state."""
        return Segments(self._rows, self._before)

    @cached_property
    def states(self) -> RowIds:
        """Which of the states that prompts left each sequence goes on from; the last one is of no prompt."""
        has_rows = self._layout.lengths > 0
        place = np.where(has_rows, np.cumsum(has_rows) - 1, has_rows.sum())
        ids = [*place[self._after], *[has_rows.sum()] * (len(self._rows) - len(self._after))]
        return RowIds(torch.tensor(ids))

    @property
    def tables(self) -> list[Tables]:
        return [self.blocks, self.plan, *([self.segments] if self._has_states else []), self]

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        return [self.positions, self.prompt_rows.ids, *self.order]

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self.positions, prompt_rows, order, inverse = tensors
        self.prompt_rows, self.order = RowIds(prompt_rows), (order, inverse)


class SampleContext(WholeSequences, CarryingContext):
    """Samples that continue prompts which were read. sample_tables: of these samples, on the device.

    routing: of their rows.
    """

    tables: Sequence[Tables] = ()

    def __init__(self, sample_tables: SampleTables, prompts: Prompts, routing: Routing = FREE):
        self.routing = routing
        self.positions, self._tables, self._kv = sample_tables.positions, sample_tables, prompts.kv
        self._prompts = prompts
        self.in_pass = Pass(sample_tables.blocks, prompts.buffers)
        self._kv_pass = Pass(buffers=prompts.kv_buffers)

    @property
    def segments(self) -> Segments:
        return self._tables.segments

    def before(self, layer: int) -> Left | None:
        left = self._prompts.left.get(layer)
        if left is None:
            return None
        rows = (read_rows(self._tables.states, x, self._kv_pass) for x in left)
        return Left.of_rows(self._prompts.states[layer], *rows)

    def leave(self, layer: int, left: Left) -> None:
        """Nobody goes on from samples."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        rule: AttentionRule,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kv = self._kv.get(layer)
        return attend_after(kv, self._kv_pass, self._tables, q, k, v, scale, rule, sinks)


def attend_after(
    prompt_kv: torch.Tensor | None,
    kv_pass: Pass,
    tables: SampleTables,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of samples to their prompts and to themselves. q [T, Hq, D], k and v [T, Hkv, D] -> as q.

    prompt_kv [B, 2 Hkv D]: keys and values of the prompts; None where every prompt has one token. kv_pass: of
    their gradient.
    """
    if not len(tables.prompt_rows):
        return attention(q, k, v, tables.plan, scale, rule, sinks)
    kv = torch.cat(
        [read_rows(tables.prompt_rows, prompt_kv, kv_pass), torch.stack([k, v], 1).view(len(k), -1)]
    )
    k, v = reordered(kv, *tables.order).view(-1, 2, *k.shape[1:]).unbind(1)
    return attention(q, k, v, tables.plan, scale, rule, sinks)


def reordered(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """The rows of x in another order: the row i of the result is the row order[i] of x. inverse: of order."""
    return _Reordered.apply(x, order, inverse)


class _Reordered(torch.autograd.Function):
    """Rows of x in another order.

    order: the row of x that each output row comes from.
    inverse: the output row that each row of x goes to.

    torch's own gradient of index_select would add rows up, and on a GPU with atomics.
    """

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, dx):
        return dx.index_select(0, ctx.inverse), None, None


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """counts[i] numbers from starts[i] on (starts[i], starts[i] + 1, ...), one i after another."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
