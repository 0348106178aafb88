"""Which weights of a model are quantised, and how; how keys and values are: settings in words, without torch.

The matrices of attention and MLPs are, in experts too. Norms, biases, the embedding, lm_head and routers are
not, as in vLLM (`model_executor/layers/quantization/fp8.py` has a method for linear layers and experts; the
embedding, lm_head and the gate of Qwen3-MoE are made without it). They are a small part of the arithmetic of
a large model, and an error in them reaches every token's logits, or the choice of experts.

The scale of keys and values is 1, or one of each token, or one of each head of each token. Each depends on
the token alone. One scale from the largest key of a whole tensor would depend on the tokens beside it, and on
those that come later, so there is none: an engine that has such a scale takes it from a calibration. vLLM's
`kv_cache_dtype = "fp8"` has the scale 1 unless the checkpoint brings k_scale and v_scale
(`model_executor/layers/quantization/kv_cache.py`). Its `fp8_per_token_head` and `int8_per_token_head` have
one of each head of each token (`v1/attention/ops/triton_reshape_and_cache_flash.py`).
"""

from collections.abc import Collection
from typing import NamedTuple

from .lora import matrix_kinds

FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8")
# The size of a block with one scale, for kernels/quantise.py. 128 is vLLM's size of a block.
SCALES = {"tensor": 0, "row": 1, "block": 128, "block32": 32}
# Of keys and values.
KV_SCALES = ("unit", "token", "token_head")
_POWER_OF_TWO = "pow2"


class Quantisation(NamedTuple):
    """How a weight is quantised (kernels/quantise.py)."""

    format: str
    size: int
    power_of_two: bool = False

    @classmethod
    def parse(cls, text: str) -> "Quantisation":
        """Of FORMAT/SCALE or FORMAT/SCALE/pow2, such as float8_e4m3fn/block. Raises ValueError."""
        format, scale, power_of_two = _parsed(text, SCALES)
        return cls(format, SCALES[scale], power_of_two)


class KvQuantisation(NamedTuple):
    """How keys and values are quantised. See kv_rounding.py."""

    format: str
    scale: str  # one of KV_SCALES
    power_of_two: bool = False

    @classmethod
    def parse(cls, text: str) -> "KvQuantisation":
        """Of FORMAT/SCALE or FORMAT/SCALE/pow2, such as float8_e4m3fn/unit. Raises ValueError."""
        how = cls(*_parsed(text, KV_SCALES))
        if how.scale == "unit" and how.format == "int8":
            raise ValueError(
                f"{text}: with the scale 1 an int8 is a whole number, and keys and values are small; choose "
                "the scale token or token_head, or a float8 format"
            )
        if how.scale == "unit" and how.power_of_two:
            raise ValueError(f"{text}: the scale 1 is a power of two already; leave out /{_POWER_OF_TWO}")
        return how


def _parsed(text: str, scales: Collection[str]) -> tuple[str, str, bool]:
    """The format, the scale, and whether the scale is a power of two. Raises ValueError."""
    format, _, rest = text.partition("/")
    scale, slash, power = rest.partition("/")
    if format not in FORMATS or scale not in scales or (slash and power != _POWER_OF_TWO):
        raise ValueError(
            f"{text} must be FORMAT/SCALE or FORMAT/SCALE/{_POWER_OF_TWO}; FORMAT is one of "
            f"{', '.join(FORMATS)}, and SCALE one of {', '.join(scales)}"
        )
    return format, scale, bool(slash)


def is_quantised(name: str) -> bool:
    """Whether the tensor of a checkpoint with this name is quantised."""
    return name.startswith("model.layers.") and bool(matrix_kinds(name))
