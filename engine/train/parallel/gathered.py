"""Whole weights that exist only while somebody draws or scores with them; between, each rank has its pieces.

All ranks gather together. So they call what is here together, each for its own part of the work.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ....kernels.sampling_params import SamplingParams
from ....model.checkpoint import read_rows
from ....model.decoder import Decoder
from ....model.weights import Layout, fingerprint
from ...rollout.types import Completion, Request, Rollout
from .pieces import Pieces
from .process_group import Ranks
from .scorer import Scorer, WorkersSampler


class SpreadWeights(Protocol):
    """Weights of which each rank has pieces."""

    def gather_into(self, flat: torch.Tensor) -> None:
        """Write all of them to `flat`, in its dtype. All ranks call this together."""
        ...


class FrozenPieces:
    """Spread weights that nothing trains, in the dtype that they compute in."""

    def __init__(self, folder: Path, layout: Layout, dtype: torch.dtype, ranks: Ranks, device: torch.device):
        """Read this rank's pieces from a model's folder. Raises ValueError (see read_rows)."""
        self._pieces = Pieces(layout.entries.values(), ranks)
        rows = read_rows(folder, layout, self._pieces.rows)
        pieces = [rows[part.name].reshape(-1).to(device, dtype) for part in self._pieces.parts]
        self._own = torch.cat(pieces)

    def gather_into(self, flat: torch.Tensor) -> None:
        self._pieces.gather_into(flat, self._own)


class WholeWeights:
    """A whole copy of spread weights, in the memory of a decoder. It exists only while it is asked for."""

    def __init__(self, spread: SpreadWeights, decoder: Decoder):
        """decoder: over a flat tensor of zeros, whose memory is freed."""
        self._spread, self.decoder = spread, decoder
        self._bytes = decoder.flat.nbytes
        decoder.flat.untyped_storage().resize_(0)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside this context the decoder has the weights. All ranks must enter it together."""
        flat = self.decoder.flat.detach()
        flat.untyped_storage().resize_(self._bytes)
        flat.zero_()
        self._spread.gather_into(flat)
        try:
            yield
        finally:
            flat.untyped_storage().resize_(0)

    def fingerprint(self) -> str:
        """The hash of the weights, in the decoder's dtype. All ranks call this together."""
        layout = self.decoder.layout
        # Memory of its own: torch cannot free what numpy has seen.
        flat = torch.zeros(layout.numel, dtype=self.decoder.dtype, device=self.decoder.device)
        self._spread.gather_into(flat)
        return fingerprint(layout, flat)


class GatheredScorer:
    """A Scorer over whole weights, which are gathered for each of its calls."""

    def __init__(self, scorer: Scorer, whole: WholeWeights):
        self._scorer, self._whole = scorer, whole

    @property
    def decoder(self) -> Decoder:
        """Its weights are there inside a call only."""
        return self._whole.decoder

    def fingerprint(self) -> str:
        return self._whole.fingerprint()

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        with self._whole.gathered():
            return self._scorer.score(rollouts, sampling_params)

    def values(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        with self._whole.gathered():
            return self._scorer.values(rollouts)

    def close(self) -> None:
        """Nothing runs outside this process."""


class GatheredSampler:
    """A sampler over whole weights, which are gathered for each of its calls."""

    def __init__(self, sampler: WorkersSampler, whole: WholeWeights):
        self._sampler, self._whole = sampler, whole

    @property
    def samples_at_once(self) -> int:
        return self._sampler.samples_at_once

    @property
    def version(self) -> int:
        return self._sampler.version

    def sync_weights(self, version: int) -> None:
        self._sampler.sync_weights(version)

    def end_turns(self) -> None:
        self._sampler.end_turns()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        with self._whole.gathered():
            return self._sampler.generate(requests)

    def score(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams) -> list[np.ndarray]:
        with self._whole.gathered():
            return self._sampler.score(rollouts, sampling_params)

    def close(self) -> None:
        """Nothing runs outside this process."""
