"""Prompts and their samples in one forward and one backward.

prompts.py reads the prompts first, and sends their gradient back after all micro-batches of samples. So every
weight is needed four times, and its gradient is whole after the last of them only. Here one forward holds all
rows: of each pass of prompts (prompts.prompt_passes) the rows of the samples, then those of the prompts. The
token blocks have the order of prompts.py, and so has every sum. All bits are equal.

Both ways stay: this one holds the activations of a whole virtual shard, whatever the micro-batch
(benchmarks/LOG.md, "Prompts"); the other one would add the ranks' gradients in two parts, in other bits.

After the attention of the last layer nobody reads the rows of the prompts: the samples' rows go on alone.

Shapes: n rows of samples, B rows of prompts (without the last token of each), T rows of all and of padding.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.attention import attention, varlen_plan
from ..kernels.attention_rule import AttentionRule
from ..kernels.order import token_blocks
from ..kernels.passes import ONE_SEQUENCE, Pass
from ..kernels.recurrent_state import Segments
from ..kernels.shared_rows import ALL_ROWS, SharedRows
from ..kernels.upload import Tables
from .config import ModelConfig
from .context import NO_BUFFERS, Buffers, NarrowingContext, WholeSequences
from .decoder import Forward, with_padding
from .prompts import (
    PromptLayout,
    SampleTables,
    attend_after,
    prompt_passes,
    ranges,
    reordered,
    whole_sequences,
)
from .routing import FREE, Routing
from .shared_context import sizes_of_rank


class _Samples(NamedTuple):
    """The rows of the samples alone; see decoder.Context."""

    in_pass: Pass
    routing: Routing


class _RoutingByKind(Routing):
    """A routing that counts the rows by kind, for the rows as they lie in a context."""

    tables: Sequence[Tables] = ()  # whoever made the routing hands them over

    def __init__(self, routing: Routing, context: "OnePassContext"):
        self._routing, self._context = routing, context

    def experts(self, layer: int, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if not self._context.moves:
            return self._routing.experts(layer, logits, ids)
        order, inverse = self._context.order
        by_kind = ids[inverse]
        given = self._routing.experts(layer, reordered(logits, inverse, order), by_kind)
        return ids if given is by_kind else given[order]


class OnePassContext(NarrowingContext, WholeSequences):
    """The rows of samples and of their prompts, all of one virtual shard."""

    def __init__(
        self,
        config: ModelConfig,
        lengths: Sequence[int],
        prompts: Sequence[Sequence[int]],
        padding: int = 0,
        buffers: Buffers = NO_BUFFERS,
        routing: Routing = FREE,
    ):
        """lengths [S]: rows of each sample; the first is of its prompt's last token.

        prompts [S]: the prompt of each sample. Equal prompts lie side by side.
        buffers: where the weights' gradients are summed. routing: of the rows by kind: samples, then prompts,
        then padding; of the samples alone in the last layer.
        """
        layout = PromptLayout(prompts)
        self.routing = routing if routing is FREE else _RoutingByKind(routing, self)
        self._last = config.layers - 1
        self.rows = sum(lengths), int(layout.lengths.sum()), padding
        self._samples = SampleTables(config, lengths, layout, layout.prompt_of_sample)
        self._layout, self._lengths = layout, [*lengths, padding] if padding else list(lengths)
        self._has_states = bool(config.states)
        read = [n for n in layout.lengths.tolist() if n]
        self._prompts = varlen_plan(read, config.heads, config.kv_heads) if read else None
        self._ordered, in_order = _order(lengths, layout, prompt_passes(prompts), padding)
        self.order = self._ordered, self._ordered.argsort()
        self.moves = not bool((self._ordered == torch.arange(len(self._ordered))).all())
        prompt_positions = torch.from_numpy(ranges(np.zeros_like(layout.lengths), layout.lengths))
        zeros = torch.zeros(padding, dtype=torch.int64)
        self.positions = torch.cat([self._samples.positions, prompt_positions, zeros])[self._ordered]
        self.in_pass = Pass(token_blocks(in_order), buffers)
        self.narrowed = _Samples(Pass(self._samples.blocks, buffers), routing)

    @cached_property
    def segments(self) -> Segments:
        whole_sequences(self._layout)
        return Segments(self._lengths)

    @property
    def tables(self) -> list[Tables]:
        plans = [] if self._prompts is None else [self._prompts]
        segments = [self.segments] if self._has_states else []
        return [self.in_pass.blocks, *self._samples.tables, *plans, *segments, self]

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        return [self.positions, *self.order]

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self.positions, *order = tensors
        self.order = tuple(order)

    def by_kind(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of x [T, ...] by what they are of: samples [n, ...], prompts [B, ...], and padding."""
        order, inverse = self.order
        return (reordered(x, inverse, order) if self.moves else x).split(self.rows)

    def narrow(self, x: torch.Tensor) -> torch.Tensor:
        return self.by_kind(x)[0]

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
        """In the last layer it returns only the rows of the samples, [n, Hq, D]."""
        (q, q_prompts, q_padding), (k, k_prompts, _), (v, v_prompts, _) = map(self.by_kind, (q, k, v))
        kv = torch.stack([k_prompts, v_prompts], dim=1).flatten(1)
        # The gradient of a prompt's keys and values is summed over its samples in fp32, and rounded once.
        z, z_prompts, _ = (None, None, None) if sinks is None else self.by_kind(sinks)
        o = attend_after(kv, ONE_SEQUENCE, self._samples, q, k, v, scale, rule, z)
        if layer == self._last:
            return o
        prompt_rows = q_prompts
        if self._prompts is not None:
            prompt_rows = attention(q_prompts, k_prompts, v_prompts, self._prompts, scale, rule, z_prompts)
        o = torch.cat([o, prompt_rows, torch.zeros_like(q_padding)])
        return reordered(o, *self.order) if self.moves else o


def _order(
    lengths: Sequence[int], layout: PromptLayout, passes: Sequence[slice], padding: int
) -> tuple[torch.Tensor, list[int]]:
    """Which row lies where, [T], and the rows of each sequence in this order, without padding.

    The rows are counted by kind: all samples, then all prompts, then padding.
    """
    rows, n = np.array(lengths), sum(lengths)
    starts, parts, in_order = np.cumsum(rows) - rows, [], []
    for samples in passes:
        first, last = (layout.prompt_of_sample[i] for i in (samples.start, samples.stop - 1))
        prompts = slice(first, last + 1)
        parts += [ranges(starts[samples], rows[samples])]
        parts += [ranges(layout.starts[prompts] + n, layout.lengths[prompts])]
        in_order += [*rows[samples].tolist(), *layout.lengths[prompts].tolist()]
    total = n + int(layout.lengths.sum())
    return torch.from_numpy(np.concatenate([*parts, np.arange(total, total + padding)])), in_order


def one_pass(
    forward: Forward,
    ids: torch.Tensor,
    lengths: Sequence[int],
    prompts: Sequence[Sequence[int]],
    buffers: Buffers = NO_BUFFERS,
    routing: Routing = FREE,
    shared_rows: SharedRows = ALL_ROWS,
) -> tuple[torch.Tensor, OnePassContext]:
    """The ids [T] of one forward, and its context. ids [n]: of the samples. Others: see OnePassContext.

    shared_rows: the ranks that share the rows; the context has this rank's heads.
    """
    firsts = PromptLayout(prompts).firsts
    prompt_ids = [token for prompt in compress(prompts, firsts) for token in prompt[:-1]]
    all_ids = torch.cat([ids, torch.tensor(prompt_ids, dtype=torch.int64)])
    by_kind, padding = with_padding(all_ids, forward, shared_rows.size)
    config = sizes_of_rank(forward.config, shared_rows)
    context = OnePassContext(config, lengths, prompts, padding, buffers, routing)
    return by_kind[context.order[0]], context
