"""Whole weights that exist only while somebody draws or scores with them; between, each rank has its pieces.

All ranks gather together. So they call what is here together, each for its own part of the work.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ....model.decoder import Decoder
from ....model.weights import Layout, fingerprint
from .pieces import Pieces, WholeRows
from .process_group import Ranks
from .spread import Cutting


class FrozenPieces:
    """Spread weights that nothing trains, in the dtype that they compute in."""

    def __init__(
        self, folder: Path, cutting: Cutting, dtype: torch.dtype, ranks: Ranks, device: torch.device
    ):
        """Read this rank's pieces from a model's folder. Raises ValueError (see read_parts)."""
        self._pieces = Pieces(cutting.part.entries.values(), ranks.replicas)
        pieces = WholeRows(cutting, self._pieces, ranks).read(folder)
        self._own = torch.cat([x.to(device, dtype) for x in pieces])

    def gather_into(self, flat: torch.Tensor) -> None:
        self._pieces.gather_into(flat, self._own)


class WholeWeights:
    """A whole copy of spread weights, in the memory of a decoder. It exists only while it is asked for."""

    def __init__(
        self,
        gather_into: Callable[[torch.Tensor], None],
        decoder: Decoder,
        model: Callable[[torch.Tensor], tuple[Layout, torch.Tensor]] | None = None,
    ):
        """gather_into: writes all weights to a flat tensor, in its dtype. All ranks call it together.

        decoder: over a flat tensor of zeros, whose memory is freed. model: of what the decoder has, the
        layout of the whole model and its weights, where ranks share layers (tensor.py); a call of all.
        """
        self._gather_into, self.decoder = gather_into, decoder
        self.model = model or (lambda flat: (decoder.layout, flat))
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
        return fingerprint(*self.model(flat))
