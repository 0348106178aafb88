"""Which experts the rows of a forward take: those that the router chose, or those that somebody names.

Shapes: T rows of a forward, C of them are asked for; L layers with experts; k experts of a token, in its
slots.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from ..kernels.upload import Tables
from .sizes import Experts


class Routing(Protocol):
    """It is told the chosen experts of each layer with experts, and returns those that compute."""

    @property
    def tables(self) -> Sequence[Tables]:
        """What it reads on a device, which goes there with the forward's tables (kernels/upload.py)."""
        ...

    def experts(self, layer: int, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """ids [T, k] int64, as the router of `layer` chose by logits [T, E]. The same tensor where nothing is
        changed.

        A backward that computes a layer again calls it again.
        """
        ...


class FreeRouting:
    """The router's choice; nothing is kept."""

    tables: Sequence[Tables] = ()

    def experts(self, layer: int, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return ids


FREE = FreeRouting()


class RecordedRouting:
    """The router's choice, which is kept for some rows.

    rows [C] int64: of the forward, each once; None for all. keeps_logits: keep the router's logits too.
    """

    def __init__(self, experts: Experts, rows: torch.Tensor | None = None, keeps_logits: bool = False):
        self._layers, self._dtype, self._rows = sorted(experts.layers), id_dtype(experts.number), rows
        self._kept: dict[int, torch.Tensor] = {}
        self.by_sigmoid = experts.sigmoid is not None  # how the logits become scores
        self._logits: dict[int, torch.Tensor] | None = {} if keeps_logits else None

    @property
    def tables(self) -> list[Tables]:
        return [self]

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        return [] if self._rows is None else [self._rows]

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        if tensors:
            (self._rows,) = tensors

    def experts(self, layer: int, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self._kept[layer] = self._of_rows(ids).to(self._dtype)
        if self._logits is not None:
            self._logits[layer] = self._of_rows(logits)
        return ids

    def _of_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._rows is None else x.index_select(0, self._rows)

    def taken(self) -> torch.Tensor:
        """The experts of the rows, [C, L, k] in id_dtype, after the forward."""
        return torch.stack([self._kept[layer] for layer in self._layers], dim=1)

    def logits(self) -> torch.Tensor:
        """The logits of the rows, [C, L, E], after the forward. Their gradient goes to the router."""
        assert self._logits is not None, "they were not asked for"
        return torch.stack([self._logits[layer] for layer in self._layers], dim=1)


class ReplayedRouting(RecordedRouting):
    """The first rows take the experts that they are given; rows after them take their router's choice.

    given [n, L, k]: the experts of the first n rows of the forward, in id_dtype. rows: see RecordedRouting.
    Raises ValueError for an expert that the model does not have.
    """

    def __init__(
        self,
        experts: Experts,
        given: torch.Tensor,
        rows: torch.Tensor | None = None,
        keeps_logits: bool = False,
    ):
        super().__init__(experts, rows, keeps_logits)
        check_given(experts, given)
        self._given = given

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        return [self._given, *super().host_tensors]

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._given, *rows = tensors
        super().arrived(device, rows)

    def experts(self, layer: int, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        given = self._given[:, self._layers.index(layer)].to(ids.dtype)
        return super().experts(layer, logits, torch.cat([given, ids[len(given) :]]))


def check_given(experts: Experts, given: torch.Tensor) -> None:
    """Raise ValueError unless given [n, L, k] are experts of the model, on the host."""
    shape = len(experts.layers), experts.per_token
    if given.dim() != 3 or given.shape[1:] != shape:
        raise ValueError(f"experts: those that are given, {tuple(given.shape)}, must be [rows, *{shape}]")
    if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < experts.number:
        raise ValueError(f"experts: those that are given must be in 0..{experts.number - 1}")


def id_dtype(number: int) -> torch.dtype:
    """The dtype of kept experts of a layer that has so many: uint8, or int16 above 256."""
    return torch.uint8 if number <= 256 else torch.int16
