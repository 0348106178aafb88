"""Log-probabilities of given completions: the trainer's side of every comparison.

Shapes: S sequences, T packed input tokens, C completion tokens. Token i of a completion is predicted by the row before
it, so a sequence of p prompt and c completion tokens has p + c - 1 input rows, of which the last c are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..kernels.logprob import Distribution, linear_logprob
from ..kernels.order import ROW_TILE, token_blocks
from .decoder import Decoder, PackedContext, Tap, ignore


@dataclass(frozen=True)
class PackedBatch:
    """Sequences packed for one forward. Build with `pack`."""

    ids: torch.Tensor  # [T] int64, inputs
    rows: torch.Tensor  # [C] int64, the input row that predicts each completion token
    targets: torch.Tensor  # [C] int64
    lengths: tuple[int, ...]  # input tokens of each sequence, sums to T
    completion_lengths: tuple[int, ...]  # sums to C


def pack(sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PackedBatch:
    """Pack (prompt_ids, completion_ids) pairs. Raises ValueError for an empty prompt or completion, naming which."""
    ids, rows, targets, lengths, completions = [], [], [], [], []
    for s, (prompt, completion) in enumerate(sequences):
        if not len(prompt) or not len(completion):
            raise ValueError(f"pack: sequence {s} has {len(prompt)} prompt and {len(completion)} completion tokens; both need one")
        start = len(ids)
        ids += [*prompt, *completion[:-1]]
        rows += range(start + len(prompt) - 1, len(ids))
        targets += completion
        lengths.append(len(prompt) + len(completion) - 1)
        completions.append(len(completion))
    as_tensor = (torch.tensor(x, dtype=torch.int64) for x in (ids, rows, targets))
    return PackedBatch(*as_tensor, tuple(lengths), tuple(completions))


def logprobs(decoder: Decoder, batch: PackedBatch, dist: Distribution, tap: Tap = ignore) -> tuple[torch.Tensor, torch.Tensor]:
    """logp [C] of the completion tokens under the distribution they are drawn from, and the entropy [C], in fp32, on the decoder's device.

    Differentiable in the decoder's weights; the entropy is not. `tap`: see Decoder.hidden.
    """
    longest = max(batch.lengths)
    if longest > decoder.config.max_positions:
        raise ValueError(f"logprobs: a sequence of {longest} tokens is longer than the context ({decoder.config.max_positions})")
    filler = -len(batch.ids) % ROW_TILE  # whole row tiles: every matrix product is spared a partial one
    # The rows are unique, so that their gradient is written and never added up.
    hidden = decoder.hidden(F.pad(batch.ids, (0, filler)), PackedContext(batch.lengths, decoder.config, filler), tap)
    rows, targets = batch.rows.to(decoder.device), batch.targets.to(decoder.device)
    head = decoder.logits_weight()
    return linear_logprob(hidden[rows].to(head.dtype), head, targets, dist, token_blocks(batch.completion_lengths))
