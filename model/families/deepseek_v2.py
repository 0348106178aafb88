"""DeepSeek-V2 and V2-Lite: latent attention; a softmax over all experts, and those of the best groups chosen.

The routing weights of a token are not divided by their sum. V2-Lite has one group.
"""

from ..blocks.deepseek import SMALL_DEEPSEEK_EXPERTS, mixed_layers, read_deepseek_experts
from ..blocks.latent_attention import SMALL_LATENT, latent_widths, read_latent
from ..blocks.residual import Layer
from ..config_file import ConfigFile
from ..family import Family

# As V2-Lite rotates.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    if config.raw.get("rope_interleave") is False:
        config.refuse("rope_interleave", False, "this architecture's class always rotates neighbours")
    return mixed_layers(
        config, read_latent(config, in_place=True), read_deepseek_experts(config, softmax=True)
    )


FAMILY = Family(
    "DeepseekV2ForCausalLM",
    layers,
    defaults={"q_lora_rank": 1536},
    head_widths=latent_widths,
    small=SMALL_LATENT
    | SMALL_DEEPSEEK_EXPERTS
    | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "norm_topk_prob": False}
    | {"num_experts_per_tok": 3}  # of as many or fewer experts than groups, the best are in the best groups
    | {"num_attention_heads": 4, "num_key_value_heads": 4, "rope_parameters": _YARN},
)
