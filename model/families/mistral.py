"""Mistral (7B v0.3, Nemo): Llama's layer without biases, and full attention."""

from ..blocks.attention import Attention
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile
from ..family import Family

# What transformers takes where config.json lacks the field.
_DEFAULT_WINDOW = 4096


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. Refuses a model that attends to a sliding window."""
    window = config.raw.get("sliding_window", _DEFAULT_WINDOW)
    if window is not None:
        config.refuse("sliding_window", window, "a Mistral with full attention has null there")
    return [pre_norm(Attention(), GatedMlp())] * config.fields.num_hidden_layers


FAMILY = Family("MistralForCausalLM", layers)
