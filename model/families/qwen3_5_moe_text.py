"""Qwen3.5, the text model of those with experts (35B-A3B): its layers with a mixture, and a shared expert."""

from pydantic import PositiveInt

from ..blocks.delta_net import LAYER_TYPES, SMALL, DeltaNet, read_delta_net
from ..blocks.experts import MixtureOfExperts, read_experts
from ..blocks.gated_attention import GatedAttention
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile, Fields
from ..family import Family


class _Fields(Fields):
    shared_expert_intermediate_size: PositiveInt


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. As in transformers, routing weights are always divided by their sum."""
    net, bias = read_delta_net(config), config.fields.attention_bias
    experts = read_experts(
        config,
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        ["shared_expert_intermediate_size"],
        shared=config.read(_Fields).shared_expert_intermediate_size,
        shared_gate=True,
    )
    mixture = MixtureOfExperts(experts)
    linear = pre_norm(DeltaNet(net.shape), mixture)
    full = pre_norm(GatedAttention(qkv_bias=bias, o_bias=bias), mixture)
    return [full if is_full else linear for is_full in net.is_full]


FAMILY = Family(
    "Qwen3_5MoeForCausalLM",
    layers,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "shared_expert_intermediate_size": 512,
        "intermediate_size": 512,  # of no layer, and the class has none
    },
    partial_rotary=True,
    layer_types=LAYER_TYPES,
    norm_plus_one=True,
    small=SMALL
    | {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 160,
        "shared_expert_intermediate_size": 128,
    },
)
