"""OLMo 2: norms of all queries and of all keys of a token, and norms after the blocks, not before."""

from ..blocks.attention import Attention
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, post_norm
from ..config_file import ConfigFile
from ..family import Family


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    bias = config.fields.attention_bias
    layer = post_norm(Attention(qkv_bias=bias, o_bias=bias, wide_qk_norm=True), GatedMlp())
    return [layer] * config.fields.num_hidden_layers


FAMILY = Family("Olmo2ForCausalLM", layers)
