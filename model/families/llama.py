"""Llama: attention, and a gated MLP. Its rotary embedding may be scaled."""

from ..blocks.attention import Attention
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile
from ..family import Family


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    bias = config.fields.attention_bias
    layer = pre_norm(Attention(qkv_bias=bias, o_bias=bias), GatedMlp())
    return [layer] * config.fields.num_hidden_layers


FAMILY = Family("LlamaForCausalLM", layers, vllm_exact=True)
