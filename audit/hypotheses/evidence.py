"""What hypotheses are tried on: the lines of a log with two columns, and ways to score them otherwise.

Shapes: C completion tokens, T tokens of one sequence, D width of the model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ...engine.tasks.tokenizer import Tokenizer
from ...kernels.logprob import linear_logprob
from ...kernels.sampling_params import SamplingParams
from ...model.checkpoint import load_decoder
from ...model.decoder import Decoder, Hook, Numerics, PackedContext, no_hook
from ...model.scoring import pack
from ..engines.engine import TOGETHER, Engine, Pair, ZeroklEngine

Scores = dict[int, np.ndarray]  # of a line, by its index in Evidence.lines: [C] fp32, NaN where unknown


@dataclass(frozen=True)
class Line:
    """One completion of the log."""

    index: int  # of the rollout in the report
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logged: np.ndarray  # [C] fp32, the sampler's; NaN where there is none
    scored: np.ndarray  # [C] fp32, the trainer's; NaN where there is none
    params: SamplingParams | None = None
    masked: bool = False  # whether the log says that some tokens were not drawn

    @property
    def pair(self) -> Pair:
        """(prompt_ids, completion_ids)."""
        return self.prompt_ids, self.completion_ids


@dataclass(frozen=True)
class Scorer:
    """The model behind the trainer's column."""

    trainer: Engine
    folder: Path
    dtype: torch.dtype
    head: torch.dtype
    device: torch.device
    tokenizer: Tokenizer
    checkpoints: tuple[Path, ...] = ()  # other weights that may have drawn the log
    _loaded: dict = field(default_factory=dict)

    def decoder(self, folder: Path | None = None, dtype: torch.dtype | None = None) -> Decoder:
        """Our decoder of a checkpoint. The trainer's own is used where it is ours."""
        folder, dtype = folder or self.folder, dtype or self.dtype
        if folder == self.folder and dtype == self.dtype and isinstance(self.trainer, ZeroklEngine):
            return self.trainer.decoder
        decoder = load_decoder(folder, dtype, self.device)
        decoder.numerics = Numerics(lm_head=self.head if dtype == self.dtype else None)
        return decoder

    def own(self) -> Decoder:
        """Our decoder of the trainer's checkpoint, kept from the first call on."""
        if "own" not in self._loaded:
            self._loaded["own"] = self.decoder()
        return self._loaded["own"]

    def score(self, pairs: Sequence[Pair], params: Sequence[SamplingParams]) -> list[np.ndarray]:
        """The trainer's logprobs [C] of each pair, each under its own sampling parameters."""
        scores: dict[int, np.ndarray] = {}
        for same in dict.fromkeys(params):
            indices = [i for i, p in enumerate(params) if p == same]
            scores |= zip(indices, self.trainer.score([pairs[i] for i in indices], same), strict=True)
        return [scores[i] for i in range(len(pairs))]


@dataclass(frozen=True)
class Evidence:
    """The lines on which hypotheses are tried. scorer: None where the log has both columns and no model."""

    lines: list[Line]
    scorer: Scorer | None = None

    def params(self) -> list[SamplingParams]:
        """The sampling parameters of each line."""
        return [line.params or SamplingParams() for line in self.lines]

    def pairs(self) -> list[Pair]:
        """The pair of each line."""
        return [line.pair for line in self.lines]

    def by_line(self, scores: Iterable[np.ndarray]) -> Scores:
        """Scores of all lines, in their order."""
        return dict(enumerate(scores))


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
        rows += hidden[batch.rows.to(hidden.device)].split(batch.completion_lengths)
    return rows


@torch.no_grad()
def read_rows(
    decoder: Decoder, rows: Sequence[torch.Tensor], pairs: Sequence[Pair], params: Sequence[SamplingParams]
) -> list[np.ndarray]:
    """logp [C] of each completion from its rows [C, D]."""
    lm_head = decoder.logits_weight()
    return [
        linear_logprob(
            h.to(lm_head.dtype), lm_head, torch.tensor(list(completion), device=h.device), sampling_params
        )[0]
        .cpu()
        .numpy()
        for h, (_, completion), sampling_params in zip(rows, pairs, params, strict=True)
    ]


def decoder_scores(
    decoder: Decoder,
    evidence: Evidence,
    positions: Sequence[np.ndarray] | None = None,
    hook_of: Callable[[PackedContext], Hook] | None = None,
) -> Scores:
    """The logprobs of all lines by a decoder, under the lines' own sampling parameters (see hidden_rows)."""
    pairs = evidence.pairs()
    rows = hidden_rows(decoder, pairs, positions, hook_of)
    return evidence.by_line(read_rows(decoder, rows, pairs, evidence.params()))
