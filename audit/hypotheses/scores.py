"""Scores of the lines of a log by a decoder, or by parts of it that were changed.

Shapes: C completion tokens, T tokens of one sequence, D width of the model.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ...kernels.logprob import linear_logprob
from ...kernels.sampling_params import SamplingParams
from ...model.context import Hook, PackedContext, no_hook
from ...model.decoder import Decoder
from ...model.scoring import pack
from ..engines.engine import TOGETHER, Pair
from .hf_forward import HfForward
from .scorable_lines import Lines, Scores

Forward = Decoder | HfForward


@torch.no_grad()
def hidden_rows(
    decoder: Forward,
    pairs: Sequence[Pair],
    positions: Sequence[np.ndarray] | None = None,
    hook_of: Callable[[PackedContext], Hook] | None = None,
) -> list[torch.Tensor]:
    """The rows [C, D] that predict each completion.

    positions: of the input tokens [T] of each pair, in place of 0, 1, 2, ... hook_of: the hook of a forward;
    it may write over the outputs that it is given. Of transformers' forward the rows are logits, [C, V].
    """
    if isinstance(decoder, HfForward):
        return decoder.logits(pairs, positions)
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
    decoder: Forward, rows: Sequence[torch.Tensor], pairs: Sequence[Pair], params: Sequence[SamplingParams]
) -> list[np.ndarray]:
    """logp [C] of each completion from its rows (see hidden_rows)."""
    if isinstance(decoder, HfForward):
        return [decoder.read(z, c, p) for z, (_, c), p in zip(rows, pairs, params, strict=True)]
    lm_head = decoder.logits_weight()
    return [
        linear_logprob(
            h.to(lm_head.dtype),
            lm_head,
            torch.tensor(list(completion), device=h.device),
            sampling_params,
            tiles=decoder.numerics.tiles,
            cap=decoder.config.head.cap,
        )[0]
        .cpu()
        .numpy()
        for h, (_, completion), sampling_params in zip(rows, pairs, params, strict=True)
    ]


def decoder_scores(
    decoder: Forward,
    evidence: Lines,
    positions: Sequence[np.ndarray] | None = None,
    hook_of: Callable[[PackedContext], Hook] | None = None,
) -> Scores:
    """The logprobs of all lines by a decoder, under the lines' own sampling parameters (see hidden_rows)."""
    return evidence.by_line(_read(decoder, evidence, evidence.params(), positions, hook_of))


def under(
    evidence: Lines, decoder: Forward, change: Callable[[SamplingParams], SamplingParams]
) -> Scores | None:
    """The scores of all lines under changed sampling parameters; None where nothing changes."""
    params = evidence.params()
    changed = [change(p) for p in params]
    return None if changed == params else evidence.by_line(_read(decoder, evidence, changed))


def _read(
    decoder: Forward,
    evidence: Lines,
    params: Sequence[SamplingParams],
    positions: Sequence[np.ndarray] | None = None,
    hook_of: Callable[[PackedContext], Hook] | None = None,
) -> Iterator[np.ndarray]:
    """logp [C] of each line. The rows of one forward are held at a time."""
    pairs = evidence.pairs()
    for start in range(0, len(pairs), TOGETHER):
        batch = slice(start, start + TOGETHER)
        moved = None if positions is None else positions[batch]
        rows = hidden_rows(decoder, pairs[batch], moved, hook_of)
        yield from read_rows(decoder, rows, pairs[batch], params[batch])
