"""Qwen3: Llama's layer, with norms of each query head and key head."""

from ..blocks.attention import Attention
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile
from ..family import Family


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    bias = config.fields.attention_bias
    layer = pre_norm(Attention(qkv_bias=bias, o_bias=bias, qk_norm=True), GatedMlp())
    return [layer] * config.fields.num_hidden_layers


FAMILY = Family(
    "Qwen3ForCausalLM",
    layers,
    defaults={"head_dim": 128, "num_key_value_heads": 32, "use_sliding_window": False},
    vllm_exact=True,
)
