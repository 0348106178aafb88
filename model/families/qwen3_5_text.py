"""Qwen3.5, the text model of the dense ones: layers with a gated delta net, and some with gated attention."""

from ..blocks.delta_net import LAYER_TYPES, SMALL, DeltaNet, read_delta_net
from ..blocks.gated_attention import GatedAttention
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile
from ..family import Family


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    net, bias = read_delta_net(config), config.fields.attention_bias
    linear = pre_norm(DeltaNet(net.shape), GatedMlp())
    full = pre_norm(GatedAttention(qkv_bias=bias, o_bias=bias), GatedMlp())
    return [full if is_full else linear for is_full in net.is_full]


FAMILY = Family(
    "Qwen3_5ForCausalLM",
    layers,
    defaults={"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25},
    partial_rotary=True,
    layer_types=LAYER_TYPES,
    norm_plus_one=True,
    small=SMALL,
)
