"""Prompts that are computed once for all their samples, in training as in sampling.

Of every prompt, all tokens but the last are read in one forward, which leaves their keys and values behind,
in every layer. The samples begin with the prompt's last token and attend to them. A row depends on what is
before it only, so the bits of all rows are those of whole sequences. Backward, each sample adds its gradient
of those keys and values to fp32 buffers, and when all samples are done the sums, rounded once to the compute
dtype, go through the prompts. Order: the samples of a prompt one after another, in canonical order; a
weight's gradient takes the samples of a pass first, then its prompts. Which prompts share a pass depends on
their lengths only (`prompt_passes`), so no bit depends on the micro-batch.

Shapes: n samples of N prompts; B tokens of these prompts without the last of each; T tokens of the samples of
one forward.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..kernels.attention import attention, varlen_plan
from ..kernels.embedding import embedding
from ..kernels.grad import accumulate_dtype
from ..kernels.order import token_blocks
from .decoder import Decoder, Hook, PackedContext, no_hook, with_padding

# Tokens of the prompts of one pass; a longer prompt has a pass of its own. A constant, as it orders the
# weights' gradients.
PASS_TOKENS = 512


def first_of_prompt(prompts: Sequence[Sequence[int]]) -> list[bool]:
    """Whether each of n samples is the first of its prompt.

    prompts [n]: that of each sample, equal ones side by side.
    """
    return [i == 0 or prompt != prompts[i - 1] for i, prompt in enumerate(prompts)]


def prompt_passes(prompts: Sequence[Sequence[int]]) -> list[slice]:
    """The prompt of each of n samples -> slices of samples whose prompts are read together.

    Samples of one prompt lie side by side.
    """
    passes, start, tokens = [], 0, 0
    for i, (prompt, first) in enumerate(zip(prompts, first_of_prompt(prompts), strict=True)):
        if i and first and tokens + len(prompt) > PASS_TOKENS:
            passes.append(slice(start, i))
            start, tokens = i, 0
        tokens += len(prompt) if first else 0
    return [*passes, slice(start, len(prompts))] if len(prompts) else []


class Prompts:
    """The prompts of n samples, read by one forward."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]], hook: Hook = no_hook):
        """prompts [n]:

        that of each sample, equal ones side by side. Raises ValueError for an empty one. `hook`: see
        Decoder.hidden.
        """
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(
                    f"prompts: prompt {i} is empty; a completion needs at least one token before it"
                )
        firsts = first_of_prompt(prompts)
        self.of = tuple((np.cumsum(firsts) - 1).tolist())  # [n], the prompt of each sample
        heads = [prompt[:-1] for prompt, first in zip(prompts, firsts, strict=True) if first]
        self.lengths = np.array([len(head) for head in heads])  # [N]
        self.starts = np.cumsum(self.lengths) - self.lengths  # [N], in B
        ids = [token for head in heads for token in head]
        self._read = _read(decoder, ids, [n for n in self.lengths.tolist() if n], hook) if ids else []
        # What the samples attend to, [B, 2 Hkv D] of each layer, as leaves with a gradient in fp32.
        self.kv = [kv.detach() for kv in self._read]
        for kv, read in zip(self.kv, self._read, strict=True):
            if read.requires_grad:
                kv.requires_grad_().main_grad = torch.zeros(
                    kv.shape, dtype=accumulate_dtype(kv.dtype), device=kv.device
                )

    def backward(self) -> None:
        """After the samples' own: send what they left in the keys and values through the prompts, to the
        weights.

        Nothing happens where the prompts were read without gradients.
        """
        if self._read and self._read[0].requires_grad:
            _Handover.apply(self.kv, *self._read).backward()


class _Handover(torch.autograd.Function):
    """A scalar whose gradient in what was read is what the leaves collected.

    autograd.backward with gradients would import sympy for it.
    """

    @staticmethod
    def forward(ctx, leaves, *read):
        ctx.leaves = leaves
        return read[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return None, *(kv.main_grad.to(kv.dtype) for kv in ctx.leaves)


def _read(decoder: Decoder, ids: list[int], lengths: list[int], hook: Hook) -> list[torch.Tensor]:
    """Keys and values of packed tokens, [B, 2 Hkv D] of each layer."""
    filled, padding = with_padding(torch.tensor(ids), decoder)
    context = _ReadingContext(lengths, decoder.config, padding)
    decoder.read(filled, context, hook)
    return context.kv


class _ReadingContext(PackedContext):
    """Whole sequences whose keys and values are kept: kv[layer] [B, 2 Hkv D], without padding rows."""

    def __init__(self, *args):
        super().__init__(*args)
        self.kv: list[torch.Tensor] = []

    def keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """See Decoder.read."""
        B = self.blocks[-1][1]
        self.kv.append(torch.stack([k[:B], v[:B]], dim=1).view(B, -1))

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See Context."""
        self.keep(k, v)
        return super().attend(layer, q, k, v, scale)


class SampleContext:
    """Samples after their prompts: packed rows that begin with the prompt's last token, then padding rows as
    in PackedContext.

    lengths [S]: rows of each sample; after [S]: its prompt, of those that were read.
    """

    def __init__(
        self,
        decoder: Decoder,
        lengths: Sequence[int],
        prompts: Prompts,
        after: Sequence[int],
        padding: int = 0,
    ):
        config, self._kv, of = decoder.config, prompts.kv, list(after)
        own, before, firsts = np.array(lengths), prompts.lengths[of], prompts.starts[of]
        if padding:
            own, before, firsts = (np.append(x, n) for x, n in ((own, padding), (before, 0), (firsts, 0)))
        self.blocks = token_blocks(lengths)
        self.positions = torch.from_numpy(_ranges(before, own))
        self._prompt_rows = torch.from_numpy(_ranges(firsts, before)).to(decoder.device)
        # Attention takes each sequence's keys together: rows of its prompt, copied for each sample, then its
        # own.
        starts = np.cumsum(before + own) - (before + own)
        lies = torch.from_numpy(np.concatenate([_ranges(starts, before), _ranges(starts + before, own)]))
        self._order = tuple(x.to(decoder.device) for x in (lies.argsort(), lies))
        self._plan = varlen_plan(own.tolist(), config.heads, config.kv_heads, before.tolist())

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See Context."""
        if not len(self._prompt_rows):
            return attention(q, k, v, self._plan, scale)
        before = embedding(self._prompt_rows, self._kv[layer])  # its gradient: one row after another
        kv = torch.cat([before, torch.stack([k, v], dim=1).view(len(k), -1)])
        k, v = _Reordered.apply(kv, *self._order).view(-1, 2, *k.shape[1:]).unbind(1)
        return attention(q, k, v, self._plan, scale)


class _Reordered(torch.autograd.Function):
    """Rows of x in another order. order: where in x each row comes from; inverse: where each row of x goes
    to.

    torch's own gradient of index_select adds rows up, on a GPU with atomics.
    """

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, dx):
        return dx.index_select(0, ctx.inverse), None, None


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[i], starts[i] + 1, ... counts[i] of them, one i after another."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
