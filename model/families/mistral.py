"""Mistral (7B v0.3, Nemo): Llama's layer without biases, and full attention."""

from ..blocks.attention import Attention
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile
from ..family import Family


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. Refuses a model that attends to a sliding window."""
    window = config.value("sliding_window")
    if window is not None:
        config.refuse("sliding_window", window, "a Mistral with full attention has null there")
    return [pre_norm(Attention(), GatedMlp())] * config.fields.num_hidden_layers


FAMILY = Family(
    "MistralForCausalLM",
    layers,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    small={"sliding_window": None},
)
