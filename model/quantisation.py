"""Which weights of a model are quantised, and how: a setting in words, without torch.

The matrices of attention and MLPs are, in experts too. Norms, biases, the embedding, lm_head and routers are
not, as in vLLM (`model_executor/layers/quantization/fp8.py` has a method for linear layers and experts; the
embedding, lm_head and the gate of Qwen3-MoE are made without it). They are a small part of the arithmetic of
a large model, and an error in them reaches every token's logits, or the choice of experts.
"""

from typing import NamedTuple

FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8")
# The size of a block with one scale, for kernels/quantise.py. 128 is vLLM's size of a block.
SCALES = {"tensor": 0, "row": 1, "block": 128, "block32": 32}
_POWER_OF_TWO = "pow2"


class Quantisation(NamedTuple):
    """See kernels/quantise.py."""

    format: str
    size: int
    power_of_two: bool = False

    @classmethod
    def parse(cls, text: str) -> "Quantisation":
        """Of FORMAT/SCALE or FORMAT/SCALE/pow2, such as float8_e4m3fn/block. Raises ValueError."""
        format, _, rest = text.partition("/")
        scale, slash, power = rest.partition("/")
        if format not in FORMATS or scale not in SCALES or (slash and power != _POWER_OF_TWO):
            raise ValueError(
                f"{text} must be FORMAT/SCALE or FORMAT/SCALE/{_POWER_OF_TWO}; FORMAT is one of "
                f"{', '.join(FORMATS)}, and SCALE one of {', '.join(SCALES)}"
            )
        return cls(format, SCALES[scale], bool(slash))


def is_quantised(name: str) -> bool:
    """Whether the tensor of a checkpoint with this name is quantised."""
    return name.startswith("model.layers.") and name.endswith("_proj.weight")
