"""GLM-4.5 and 4.6, also Air: a part of each head is rotated, and the mixture is of DeepSeek-V3's kind.

The first layers are dense. The layers of multi-token prediction that a checkpoint may hold after the last one
guess tokens ahead; no log-probability depends on them, so they are not read.
"""

from pydantic import NonNegativeInt

from ..blocks.attention import Attention
from ..blocks.experts import (
    SMALL_DEEPSEEK_EXPERTS,
    ExpertNames,
    MixtureOfExperts,
    read_deepseek_experts,
)
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile, Fields
from ..family import Family


class _Fields(Fields):
    use_qk_norm: bool = False
    num_nextn_predict_layers: NonNegativeInt = 0


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    experts, bias = read_deepseek_experts(config), config.fields.attention_bias
    attention = Attention(qkv_bias=bias, qk_norm=config.read(_Fields).use_qk_norm)
    mixture = MixtureOfExperts(experts, ExpertNames(shared="shared_experts"))
    dense, sparse = pre_norm(attention, GatedMlp()), pre_norm(attention, mixture)
    return [sparse if i in experts.layers else dense for i in range(config.fields.num_hidden_layers)]


FAMILY = Family(
    "Glm4MoeForCausalLM",
    layers,
    defaults={"num_key_value_heads": 8, "partial_rotary_factor": 0.5},
    partial_rotary=True,
    small={"partial_rotary_factor": 0.5, "use_qk_norm": True} | SMALL_DEEPSEEK_EXPERTS,
)
