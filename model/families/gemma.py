"""Gemma (1): Llama's layer with GELU; norms multiply by 1 + w, the embedding is times sqrt(hidden size)."""

from ..blocks.attention import Attention, refuse_bidirectional
from ..blocks.embedding import root_scaled
from ..blocks.mlp import GELU, gelu_mlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile
from ..family import Family


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. Refuses attention without a causal mask, and another activation."""
    refuse_bidirectional(config)
    bias = config.fields.attention_bias
    layer = pre_norm(Attention(qkv_bias=bias, o_bias=bias), gelu_mlp(config))
    return [layer] * config.fields.num_hidden_layers


FAMILY = Family(
    "GemmaForCausalLM",
    layers,
    defaults={
        "hidden_act": GELU,
        "head_dim": 256,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
    },
    norm_plus_one=True,
    embedding=root_scaled,
)
