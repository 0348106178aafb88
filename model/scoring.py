"""Log-probabilities of given completions: the trainer's side of every comparison.

Shapes: S sequences, T packed input tokens, C completion tokens. Token i of a completion is predicted by the
row before it, so a sequence of p prompt and c completion tokens has p + c - 1 input rows, of which the last c
are read. Where its prompt was read before (prompts.py), it has those c only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kernels.attention_plan import KEY_TILE
from ..kernels.logprob import linear_logprob
from ..kernels.order import token_blocks
from ..kernels.sampling_params import SamplingParams
from .cache import BlockCache, CachedContext
from .decoder import Decoder, Hook, PackedContext, no_hook, with_padding
from .prompts import Prompts, SampleContext


@dataclass(frozen=True)
class PackedBatch:
    """Sequences packed for one forward. Build with `pack`."""

    ids: torch.Tensor  # [T] int64, inputs
    rows: torch.Tensor  # [C] int64, the input row that predicts each completion token
    targets: torch.Tensor  # [C] int64
    lengths: tuple[int, ...]  # input tokens of each sequence, sums to T
    completion_lengths: tuple[int, ...]  # sums to C
    after: tuple[int, ...] | None = (
        None  # the prompt of each sequence among those read before; None where none was
    )


def pack(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]], after: Sequence[int] | None = None
) -> PackedBatch:
    """Pack (prompt_ids, completion_ids) pairs. Raises ValueError for an empty prompt or completion, naming
    which.

    after: for prompts that were read before (Prompts), which of them each pair has; its first input token is
    then the prompt's last.
    """
    ids, rows, targets, lengths, completions = [], [], [], [], []
    for s, (prompt, completion) in enumerate(sequences):
        if not len(prompt) or not len(completion):
            raise ValueError(
                f"pack: sequence {s} has {len(prompt)} prompt and {len(completion)} completion tokens; both need one"
            )
        inputs = [*(prompt if after is None else prompt[-1:]), *completion[:-1]]
        ids += inputs
        rows += range(len(ids) - len(completion), len(ids))
        targets += completion
        lengths.append(len(inputs))
        completions.append(len(completion))
    as_tensor = (torch.tensor(x, dtype=torch.int64) for x in (ids, rows, targets))
    return PackedBatch(
        *as_tensor, tuple(lengths), tuple(completions), None if after is None else tuple(after)
    )


def logprobs(
    decoder: Decoder,
    batch: PackedBatch,
    sampling_params: SamplingParams,
    hook: Hook = no_hook,
    prompts: Prompts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logp [C] of the completion tokens under the distribution they are drawn from, and the entropy [C], in
    fp32, on the decoder's device.

    Differentiable in the decoder's weights; the entropy is not. `hook`: see Decoder.hidden. `prompts`: those
    that were read before, for a batch packed so; the bits are the same. Raises ValueError for a sequence that
    is longer than the context.
    """
    before = [0] * len(batch.lengths) if prompts is None else prompts.lengths[list(batch.after)].tolist()
    longest = max(a + b for a, b in zip(before, batch.lengths, strict=True))
    if longest > decoder.config.max_positions:
        raise ValueError(
            f"logprobs: a sequence of {longest} tokens is longer than the context ({decoder.config.max_positions})"
        )
    ids, padding = with_padding(batch.ids, decoder)
    context = (
        PackedContext(batch.lengths, decoder.config, padding)
        if prompts is None
        else SampleContext(decoder, batch.lengths, prompts, batch.after, padding)
    )
    hidden = decoder.hidden(ids, context, hook)
    # The rows are unique, so that their gradient is written and never added up.
    rows, targets = batch.rows.to(decoder.device), batch.targets.to(decoder.device)
    head = decoder.logits_weight()
    return linear_logprob(
        hidden[rows].to(head.dtype), head, targets, sampling_params, token_blocks(batch.completion_lengths)
    )


@torch.no_grad()
def cached_scores(
    decoder: Decoder,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    sampling_params: SamplingParams,
    chunk: int,
) -> list[torch.Tensor]:
    """logp of each pair's completion, the tokens read through the cache `chunk` at a time (1:

    decoding); on the CPU.
    """
    inputs = [[*p, *c[:-1]] for p, c in pairs]
    need = [-(-len(ids) // KEY_TILE) for ids in inputs]
    cache = BlockCache(decoder.config, sum(need), decoder.cache_dtype, decoder.device)
    blocks = [cache.allocate(n) for n in need]
    hidden: list[list[torch.Tensor]] = [[] for _ in pairs]
    for start in range(0, max(map(len, inputs)), chunk):
        active = [i for i, ids in enumerate(inputs) if len(ids) > start]
        pieces = [inputs[i][start : start + chunk] for i in active]
        context = CachedContext(
            cache, [len(x) for x in pieces], [start] * len(active), [blocks[i] for i in active]
        )
        rows = decoder.hidden(torch.tensor([token for piece in pieces for token in piece]), context)
        for i, own in zip(active, rows.split([len(x) for x in pieces]), strict=True):
            hidden[i].append(own)
    scores, head = [], decoder.logits_weight()
    for (_, completion), rows in zip(pairs, hidden, strict=True):
        h = torch.cat(rows)[-len(completion) :]
        scores.append(
            linear_logprob(
                h.to(head.dtype), head, torch.tensor(completion, device=h.device), sampling_params
            )[0].cpu()
        )
    return scores
