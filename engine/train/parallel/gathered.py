"""Whole weights that exist only while somebody draws or scores with them; between, each rank has its pieces.

All ranks gather together. So they call what is here together, each for its own part of the work.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ....model.checkpoint import read_rows
from ....model.decoder import Decoder
from ....model.weights import Layout, fingerprint
from .pieces import Pieces
from .process_group import Ranks


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

    def __init__(self, gather_into: Callable[[torch.Tensor], None], decoder: Decoder):
        """gather_into: writes all weights to a flat tensor, in its dtype. All ranks call it together.

        decoder: over a flat tensor of zeros, whose memory is freed.
        """
        self._gather_into, self.decoder = gather_into, decoder
        self._bytes = decoder.flat.nbytes
        decoder.flat.untyped_storage().resize_(0)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside this context the decoder has the weights. All ranks must enter it together."""
        flat = self.decoder.flat.detach()
        flat.untyped_storage().resize_(self._bytes)
        flat.zero_()
        self._gather_into(flat)
        try:
            yield
        finally:
            flat.untyped_storage().resize_(0)

    def fingerprint(self) -> str:
        """The hash of the weights, in the decoder's dtype. All ranks call this together."""
        layout = self.decoder.layout
        # Memory of its own: torch cannot free what numpy has seen.
        flat = torch.zeros(layout.numel, dtype=self.decoder.dtype, device=self.decoder.device)
        self._gather_into(flat)
        return fingerprint(layout, flat)
