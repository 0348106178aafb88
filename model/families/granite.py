"""Granite (3): Llama's layer, with factors of the embedding, the scores, the branches and the logits."""

from pydantic import FiniteFloat

from ..blocks.attention import Attention
from ..blocks.embedding import Embedding, Head
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile, Fields
from ..family import Family


class _Multipliers(Fields):
    embedding_multiplier: FiniteFloat = 1.0
    attention_multiplier: FiniteFloat = 1.0
    residual_multiplier: FiniteFloat = 1.0
    logits_scaling: FiniteFloat = 1.0


def _multipliers(config: ConfigFile) -> _Multipliers:
    fields = config.read(_Multipliers)
    for name, value in fields.model_dump().items():
        if not value > 0.0:
            config.wrong(f"{name} ({value}) must be positive")
    return fields


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    factors, bias = _multipliers(config), config.fields.attention_bias
    attention = Attention(qkv_bias=bias, o_bias=bias, scale=float(factors.attention_multiplier))
    layer = pre_norm(attention, GatedMlp(), float(factors.residual_multiplier))
    return [layer] * config.fields.num_hidden_layers


FAMILY = Family(
    "GraniteForCausalLM",
    layers,
    embedding=lambda config: Embedding(float(_multipliers(config).embedding_multiplier)),
    head=lambda config: Head(float(_multipliers(config).logits_scaling)),
    small={
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
)
