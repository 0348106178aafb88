"""The shape of a run's LoRA adapters. Importing this module loads no torch."""

from typing import NamedTuple

# The matrices that can have adapters, by their names in a checkpoint's layers: the linear operations "_proj".
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# A checkpoint may hold some of them as one tensor, which has one adapter.
FUSED_TARGETS = {"qkv_proj": TARGETS[:3], "gate_up_proj": TARGETS[4:6]}


class Lora(NamedTuple):
    """The shape of a run's adapters. targets: in the order of TARGETS."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        """s = alpha / rank."""
        return self.alpha / self.rank
