"""Qwen2 and Qwen2.5: Llama's layer; queries, keys and values have a bias, which config.json does not name."""

from ..blocks.attention import Attention
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile
from ..family import Family


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    return [pre_norm(Attention(qkv_bias=True), GatedMlp())] * config.fields.num_hidden_layers


FAMILY = Family(
    "Qwen2ForCausalLM",
    layers,
    defaults={"num_key_value_heads": 32, "use_sliding_window": False},
    vllm_exact=True,
)
