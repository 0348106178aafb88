"""DeepSeek-V3 and R1, Moonlight-16B-A3B: latent attention, and DeepSeek-V3's mixture of experts.

The layers of multi-token prediction after the last one guess tokens ahead; they are not read. Published
DeepSeek-V3 is in fp8: convert it to bf16 first, with the script that comes with it (fp8_cast_bf16.py).
"""

from pydantic import NonNegativeInt

from ..blocks.deepseek import SMALL_DEEPSEEK_EXPERTS, mixed_layers, read_deepseek_experts
from ..blocks.latent_attention import SMALL_LATENT, latent_widths, read_latent
from ..blocks.residual import Layer
from ..config_file import ConfigFile, Fields
from ..family import Family


class _Fields(Fields):
    num_nextn_predict_layers: NonNegativeInt = 0
    num_mtp_layers: NonNegativeInt = 0  # its name in transformers 5


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    config.read(_Fields)
    return mixed_layers(config, read_latent(config), read_deepseek_experts(config))


FAMILY = Family(
    "DeepseekV3ForCausalLM",
    layers,
    defaults={"q_lora_rank": 1536},
    head_widths=latent_widths,
    small=SMALL_LATENT | SMALL_DEEPSEEK_EXPERTS,
)
