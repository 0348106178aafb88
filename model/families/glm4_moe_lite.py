"""GLM-4.7-Flash: the latent attention and the mixture of experts of DeepSeek-V3.

config.json says of each layer whether its MLP is dense. Without a word, all but the first have experts. The
layers of multi-token prediction after the last one guess tokens ahead; they are not read.
"""

from typing import Literal

from pydantic import NonNegativeInt

from ..blocks.deepseek import SMALL_DEEPSEEK_EXPERTS, mixed_layers, read_deepseek_experts
from ..blocks.latent_attention import SMALL_LATENT, latent_widths, read_latent
from ..blocks.residual import Layer
from ..config_file import ConfigFile, Fields
from ..family import Family


class _Fields(Fields):
    num_nextn_predict_layers: NonNegativeInt = 0
    first_k_dense_replace: NonNegativeInt | None = None
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    c, n = config.read(_Fields), config.fields.num_hidden_layers
    types = c.mlp_layer_types or ["dense", *["sparse"] * (n - 1)]
    dense_layers = [i for i, kind in enumerate(types) if kind == "dense"]
    if len(types) != n:
        config.wrong(f"mlp_layer_types has {len(types)} layers, and num_hidden_layers is {n}")
    if c.first_k_dense_replace is not None and dense_layers != list(range(c.first_k_dense_replace)):
        # transformers reads the one, vLLM the other.
        config.wrong(
            f"first_k_dense_replace ({c.first_k_dense_replace}) must be the layers that are dense by "
            f"mlp_layer_types ({dense_layers})"
        )
    return mixed_layers(config, read_latent(config), read_deepseek_experts(config, dense_layers))


FAMILY = Family(
    "Glm4MoeLiteForCausalLM",
    layers,
    defaults={"q_lora_rank": 768},
    head_widths=latent_widths,
    small=SMALL_LATENT | SMALL_DEEPSEEK_EXPERTS | {"num_attention_heads": 4, "num_key_value_heads": 4},
)
