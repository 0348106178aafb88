"""DeepSeek-V3 and R1, Moonlight-16B-A3B: latent attention, and DeepSeek-V3's mixture of experts.

The layers of multi-token prediction after the last one guess tokens ahead; they are not read. Published
DeepSeek-V3 is in fp8: convert it to bf16 first, with the script that comes with it (fp8_cast_bf16.py).
"""

from pydantic import NonNegativeInt

from ..blocks.experts import (
    SMALL_DEEPSEEK_EXPERTS,
    ExpertNames,
    MixtureOfExperts,
    read_deepseek_experts,
)
from ..blocks.latent_attention import SMALL_LATENT, latent_widths, read_latent
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile, Fields
from ..family import Family


class _Fields(Fields):
    num_nextn_predict_layers: NonNegativeInt = 0
    num_mtp_layers: NonNegativeInt = 0  # its name in transformers 5


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    config.read(_Fields)
    experts, attention = read_deepseek_experts(config), read_latent(config)
    mixture = MixtureOfExperts(experts, ExpertNames(shared="shared_experts"))
    dense, sparse = pre_norm(attention, GatedMlp()), pre_norm(attention, mixture)
    return [sparse if i in experts.layers else dense for i in range(config.fields.num_hidden_layers)]


FAMILY = Family(
    "DeepseekV3ForCausalLM",
    layers,
    defaults={"q_lora_rank": 1536},
    head_widths=latent_widths,
    small=SMALL_LATENT | SMALL_DEEPSEEK_EXPERTS,
)
