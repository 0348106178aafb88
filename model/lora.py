"""The shape of a run's LoRA adapters. Importing this module loads no torch."""

from typing import NamedTuple

# The matrices that can have adapters, by their names in a checkpoint's layers: the linear operations "_proj".
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Matrices that a family has under another name, and what they are.
_OTHER_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # of Mixtral's experts


def matrix_kind(tensor: str) -> str:
    """Which of TARGETS the tensor of a checkpoint is, by its name; "" for any other."""
    *_, module, kind = ["", *tensor.split(".")]
    module = _OTHER_NAMES.get(module, module)
    return module if kind == "weight" and module in TARGETS else ""


class Lora(NamedTuple):
    """The shape of a run's adapters. targets: in the order of TARGETS."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        """s = alpha / rank."""
        return self.alpha / self.rank
