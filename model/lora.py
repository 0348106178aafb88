"""The shape of a run's LoRA adapters. Importing this module loads no torch."""

from typing import NamedTuple

# The matrices that can have adapters, by their names in a checkpoint's layers: the linear operations "_proj".
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# A checkpoint may hold some of them as one tensor, which has one adapter.
FUSED_TARGETS = {"qkv_proj": TARGETS[:3], "gate_up_proj": TARGETS[4:6]}
# Matrices that a family has under another name, and what they are: Mixtral's experts.
_OTHER_NAMES = FUSED_TARGETS | {"w1": ("gate_proj",), "w2": ("down_proj",), "w3": ("up_proj",)}
# Latent attention: the matrices of queries, and those of which keys and values come together.
_OTHER_NAMES |= dict.fromkeys(("q_a_proj", "q_b_proj"), TARGETS[:1])
_OTHER_NAMES |= dict.fromkeys(("kv_a_proj_with_mqa", "kv_b_proj"), TARGETS[1:3])


def matrix_kinds(tensor: str) -> tuple[str, ...]:
    """Those of TARGETS that the tensor of a checkpoint holds, by its name; none for any other tensor."""
    *_, module, kind = ["", *tensor.split(".")]
    if kind != "weight":
        return ()
    return _OTHER_NAMES.get(module, (module,) if module in TARGETS else ())


class Lora(NamedTuple):
    """The shape of a run's adapters. targets: in the order of TARGETS."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    merge: bool = True  # into the weights; else each product adds theirs (kernels/linear.py)

    @property
    def scale(self) -> float:
        """s = alpha / rank."""
        return self.alpha / self.rank
