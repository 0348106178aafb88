"""SmolLM3: Llama's layer; some layers have no rotary embedding."""

from ..blocks.attention import Attention
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile, Fields
from ..family import Family


class _RotatingLayers(Fields):
    no_rope_layers: list[int] | None = None  # 1 for a layer with a rotary embedding, 0 for one without
    no_rope_layer_interval: int = 4


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. Refuses a list of layers that is too short."""
    fields, n, bias = (
        config.read(_RotatingLayers),
        config.fields.num_hidden_layers,
        config.fields.attention_bias,
    )
    config.value("pretraining_tp")  # 2 in the published file, and no class of transformers reads it
    interval, rotates = fields.no_rope_layer_interval, fields.no_rope_layers
    if rotates is None:
        if interval < 1:
            config.wrong(f"no_rope_layer_interval ({interval}) must be positive")
        rotates = [(i + 1) % interval for i in range(n)]
    if len(rotates) < n:
        config.wrong(f"no_rope_layers has {len(rotates)} entries, num_hidden_layers is {n}")
    kinds = {
        no_rope: pre_norm(Attention(qkv_bias=bias, o_bias=bias, no_rope=no_rope), GatedMlp())
        for no_rope in (False, True)
    }
    return [kinds[not x] for x in rotates[:n]]


FAMILY = Family(
    "SmolLM3ForCausalLM",
    layers,
    defaults={
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    small={"no_rope_layer_interval": 2},
)
