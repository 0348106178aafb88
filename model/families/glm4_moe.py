"""GLM-4.5 and 4.6, also Air: a part of each head is rotated, and the mixture is of DeepSeek-V3's kind.

The first layers are dense. The layers of multi-token prediction that a checkpoint may hold after the last one
guess tokens ahead; no log-probability depends on them, so they are not read.
"""

from pydantic import NonNegativeInt

from ..blocks.attention import Attention
from ..blocks.deepseek import SMALL_DEEPSEEK_EXPERTS, mixed_layers, read_deepseek_experts
from ..blocks.residual import Layer
from ..config_file import ConfigFile, Fields
from ..family import Family


class _Fields(Fields):
    use_qk_norm: bool = False
    num_nextn_predict_layers: NonNegativeInt = 0


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    bias = config.fields.attention_bias
    attention = Attention(qkv_bias=bias, qk_norm=config.read(_Fields).use_qk_norm)
    return mixed_layers(config, attention, read_deepseek_experts(config))


FAMILY = Family(
    "Glm4MoeForCausalLM",
    layers,
    defaults={"num_key_value_heads": 8, "partial_rotary_factor": 0.5},
    partial_rotary=True,
    small={"partial_rotary_factor": 0.5, "use_qk_norm": True} | SMALL_DEEPSEEK_EXPERTS,
)
