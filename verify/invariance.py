"""The harness of the law's checks: named comparisons that are counted element by element, and the verdict."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..files.bitwise import count_unequal


@dataclass
class Check:
    """One line of the table: the elements compared in one dtype, and how many of them had unequal bits."""

    name: str
    dtype: str
    comparisons: int = 0
    unequal: int = 0

    def compare(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare a and b, and add to the counts. Raises ValueError when shape or dtype differ."""
        self.comparisons += a.numel()
        self.unequal += count_unequal(a, b)

    @classmethod
    def between(
        cls, name: str, dtype: str, ways: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
    ) -> "Check":
        """A check of tensors that were computed in two ways, each beside the other."""
        check = cls(name, dtype)
        for left, right in ways:
            for a, b in zip(left, right, strict=True):
                check.compare(a, b)
        return check

    @property
    def holds(self) -> bool:
        """Whether something was compared, and nothing was unequal."""
        return self.comparisons > 0 and self.unequal == 0
