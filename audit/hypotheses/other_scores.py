"""Ways to score the lines of a log otherwise, with a model.

Shapes: C completion tokens, T tokens of one sequence, D width of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from ...engine.tasks.tokenizer import Tokenizer
from ...kernels.sampling_params import SamplingParams
from ...kernels.tile_tables import TileTable
from ...model.checkpoint import DTYPES, load_decoder, read_weights
from ...model.decoder import Numerics
from ..engines.audited_model import AuditedModel
from ..engines.engine import Engine, Pair, ZeroklEngine
from .hf_forward import HfForward
from .judgement import EDGE_SHARE, EDGE_SUM
from .logits import Rows, rows_of
from .scorable_lines import Lines, Scores
from .scores import Forward, decoder_scores, hidden_rows, read_rows

_LinesT = TypeVar("_LinesT", bound=Lines)


@dataclass(frozen=True)
class ModelAdapters:
    """The LoRA adapter that is merged into the trainer's model, and others that may have drawn the log."""

    base: Path  # what the adapters belong to
    merged: Path  # folders of PEFT
    others: tuple[Path, ...]


@dataclass(frozen=True)
class Scorer:
    """The model behind the trainer's column."""

    trainer: Engine
    folder: Path
    dtype: torch.dtype
    head: torch.dtype
    device: torch.device
    tokenizer: Tokenizer
    tiles: TileTable
    checkpoints: tuple[Path, ...] = ()  # other weights that may have drawn the log
    adapters: ModelAdapters | None = None
    audited: AuditedModel | None = None  # of the folder, where zerokl has no decoder of its family
    knobs: bool = False  # whether knobs are tried though a hypothesis fits
    sampler_dtype: str = ""  # of the log's sampler, where it was given
    _loaded: list[Forward] = field(default_factory=list)
    _bases: dict[Path, torch.Tensor] = field(default_factory=dict)

    @property
    def has_decoder(self) -> bool:
        """Whether zerokl has a decoder of the family. Without one, transformers' forward stands for it."""
        return self.audited is None

    def decoder(self, folder: Path | None = None, dtype: torch.dtype | None = None) -> Forward:
        """Our decoder of a checkpoint. The trainer's own is used where it is ours."""
        folder, dtype = folder or self.folder, dtype or self.dtype
        if self.audited:
            return HfForward.load(folder, dtype, self.device, self.audited)
        if folder == self.folder and dtype == self.dtype and isinstance(self.trainer, ZeroklEngine):
            return self.trainer.decoder
        head = self.head if dtype == self.dtype else None
        return load_decoder(folder, dtype, self.device, Numerics(lm_head=head, tiles=self.tiles))

    def model(self) -> Forward:
        """Our decoder of the trainer's checkpoint, kept from the first call on."""
        if not self._loaded:
            self._loaded.append(self.decoder())
        return self._loaded[0]

    def score(self, pairs: Sequence[Pair], params: Sequence[SamplingParams]) -> list[np.ndarray]:
        """The trainer's logprobs [C] of each pair, each under its own sampling parameters."""
        scores: dict[int, np.ndarray] = {}
        for same in dict.fromkeys(params):
            indices = [i for i, p in enumerate(params) if p == same]
            scores |= zip(indices, self.trainer.score([pairs[i] for i in indices], same), strict=True)
        return [scores[i] for i in range(len(pairs))]

    @property
    def is_ours(self) -> bool:
        """Whether the trainer's column is that of `model`."""
        return isinstance(self.trainer, ZeroklEngine) or not self.has_decoder

    @property
    def takes_positions(self) -> bool:
        """Whether the model's forward takes positions of its input tokens."""
        model = self.model()
        return not isinstance(model, HfForward) or model.takes_positions

    def scores(self, evidence: Lines) -> Scores:
        """The logprobs of all lines by our decoder of the trainer's checkpoint."""
        return decoder_scores(self.model(), evidence)

    def rows(self, evidence: Lines) -> Rows:
        """The logits of the lines by our decoder of the trainer's checkpoint."""
        return rows_of(self.model(), evidence)

    def base_weights(self) -> torch.Tensor:
        """The weights of the adapters' base [numel] fp32 on the host, read once; a copy."""
        base = self.adapters.base
        if base not in self._bases:
            self._bases[base] = read_weights(base, self.model().layout)
        return self._bases[base].clone()

    def by_dtype(self, evidence: Lines) -> dict[str, Scores]:
        """The logprobs of all lines by our decoder of the trainer's checkpoint, in each dtype."""
        return {
            name: decoder_scores(self.model() if dtype == self.dtype else self.decoder(dtype=dtype), evidence)
            for name, dtype in DTYPES.items()
        }

    def with_slack(self, evidence: _LinesT) -> _LinesT:
        """The lines with `slack`: how far a cut that keeps a little more or less moves each number.

        Under top-p and min-p a rounding decides whether a token at the edge is kept, and all kept tokens
        share what one more or one fewer has. So two sound engines differ by more than they round, now and
        then. Without such a cut nothing changes.
        """
        params, pairs = evidence.params(), evidence.pairs()
        if not any(p.top_p < 1.0 or p.min_p > 0.0 for p in params):
            return evidence
        decoder, rows = self.model(), hidden_rows(self.model(), pairs)
        as_said, less, more = (
            read_rows(decoder, rows, pairs, [_cut(p, by) for p in params]) for by in (0, -1, 1)
        )
        moves = [_largest_move(*scores) for scores in zip(as_said, less, more, strict=True)]
        lines = [
            replace(line, slack=slack if line.slack is None else line.slack + slack)
            for line, slack in zip(evidence.lines, moves, strict=True)
        ]
        return replace(evidence, lines=lines)

    def altered(self, decoder: Forward) -> "Scorer":
        """The same with another model behind the trainer's column."""
        return replace(self, _loaded=[decoder])


def _cut(p: SamplingParams, by: int) -> SamplingParams:
    """The parameters with a cut that keeps less (by = -1), the same, or more (1)."""
    top_p = min(max(p.top_p + by * EDGE_SUM, 1e-6), 1.0) if p.top_p < 1.0 else 1.0
    return p._replace(top_p=top_p, min_p=p.min_p * (1.0 - by * EDGE_SHARE))


def _largest_move(scores: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """The largest |other - scores| of each token, [C]; 0 where a token is cut away."""
    with np.errstate(invalid="ignore"):
        moves = [np.abs(other.astype(np.float64) - scores) for other in others]
    return np.max([np.where(np.isfinite(x), x, 0.0) for x in moves], axis=0)
