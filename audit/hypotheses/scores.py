"""Scores of the lines of a log by a decoder, or by parts of it that were changed.

Shapes: C completion tokens, T tokens of one sequence, D width of the model.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...kernels.logprob import linear_logprob
from ...kernels.sampling_params import SamplingParams
from ...model.context import Hook, PackedContext, no_hook
from ...model.decoder import Decoder
from ...model.scoring import pack
from ..engines.engine import TOGETHER, Pair
from .lines import Lines, Scores


@torch.no_grad()
def hidden_rows(
    decoder: Decoder,
    pairs: Sequence[Pair],
    positions: Sequence[np.ndarray] | None = None,
    hook_of: Callable[[PackedContext], Hook] | None = None,
) -> list[torch.Tensor]:
    """The rows [C, D] that predict each completion.

    positions: of the input tokens [T] of each pair, in place of 0, 1, 2, ... hook_of: the hook of a forward;
    it may write over the outputs that it is given.
    """
    rows = []
    for start in range(0, len(pairs), TOGETHER):
        batch = pack(pairs[start : start + TOGETHER])
        context = PackedContext(batch.lengths, decoder.config)
        if positions is not None:
            context.positions = torch.from_numpy(np.concatenate(positions[start : start + TOGETHER]))
        hidden = decoder.hidden(batch.ids, context, hook_of(context) if hook_of else no_hook)
        rows += hidden[batch.rows.to(hidden.device)].split(batch.drawn_lengths)
    return rows


@torch.no_grad()
def read_rows(
    decoder: Decoder, rows: Sequence[torch.Tensor], pairs: Sequence[Pair], params: Sequence[SamplingParams]
) -> list[np.ndarray]:
    """logp [C] of each completion from its rows [C, D]."""
    lm_head = decoder.logits_weight()
    return [
        linear_logprob(
            h.to(lm_head.dtype),
            lm_head,
            torch.tensor(list(completion), device=h.device),
            sampling_params,
            tiles=decoder.numerics.tiles,
        )[0]
        .cpu()
        .numpy()
        for h, (_, completion), sampling_params in zip(rows, pairs, params, strict=True)
    ]


def decoder_scores(
    decoder: Decoder,
    evidence: Lines,
    positions: Sequence[np.ndarray] | None = None,
    hook_of: Callable[[PackedContext], Hook] | None = None,
) -> Scores:
    """The logprobs of all lines by a decoder, under the lines' own sampling parameters (see hidden_rows)."""
    pairs = evidence.pairs()
    rows = hidden_rows(decoder, pairs, positions, hook_of)
    return evidence.by_line(read_rows(decoder, rows, pairs, evidence.params()))


def under(
    evidence: Lines, decoder: Decoder, change: Callable[[SamplingParams], SamplingParams]
) -> Scores | None:
    """The scores of all lines under changed sampling parameters; None where nothing changes."""
    pairs, params = evidence.pairs(), evidence.params()
    changed = [change(p) for p in params]
    if changed == params:
        return None
    return evidence.by_line(read_rows(decoder, hidden_rows(decoder, pairs), pairs, changed))
