"""Gemma (1): Llama's layer with GELU; norms multiply by 1 + w, the embedding is times sqrt(hidden size)."""

from ..blocks.attention import Attention
from ..blocks.embedding import Embedding
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile
from ..family import Family

_GELU = "gelu_pytorch_tanh"


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. Refuses attention without a causal mask, and another activation."""
    if config.value("use_bidirectional_attention"):
        config.refuse("use_bidirectional_attention", True, "only causal attention is")
    if (activation := config.value("hidden_activation")) not in (None, _GELU):
        config.refuse("hidden_activation", activation, f"only {_GELU} is")
    bias = config.fields.attention_bias
    layer = pre_norm(Attention(qkv_bias=bias, o_bias=bias), GatedMlp(activation="gelu_tanh"))
    return [layer] * config.fields.num_hidden_layers


FAMILY = Family(
    "GemmaForCausalLM",
    layers,
    defaults={
        "hidden_act": _GELU,
        "head_dim": 256,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
    },
    norm_plus_one=True,
    embedding=lambda config: Embedding(config.fields.hidden_size**0.5, rounded=True),
)
