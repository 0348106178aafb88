"""The shape of a run's LoRA adapters. Importing this module loads no torch."""

from typing import NamedTuple

from .operation import Equation
from .operations import OPERATIONS

# The matrices that can have adapters, by their names in a checkpoint's layers.
TARGETS = tuple(
    row.name for row in OPERATIONS if row.equation is Equation.LINEAR and row.name.endswith("_proj")
)


class Lora(NamedTuple):
    """The shape of a run's adapters. targets: in the order of TARGETS."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        """s = alpha / rank."""
        return self.alpha / self.rank
