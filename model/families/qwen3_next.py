"""Qwen3-Next (80B-A3B): Qwen3.5's layers, with experts and a shared one behind a gate in place of the MLP.

The inputs of a gated delta net are two tensors, whose rows go by key heads.
"""

from pydantic import PositiveInt

from ..blocks.delta_net import LAYER_TYPES, SMALL, DeltaNet, read_delta_net
from ..blocks.experts import MixtureOfExperts, read_experts
from ..blocks.gated_attention import GatedAttention
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile, Fields
from ..family import Family


class _Fields(Fields):
    shared_expert_intermediate_size: PositiveInt


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    net, bias = read_delta_net(config), config.fields.attention_bias
    size = config.read(_Fields).shared_expert_intermediate_size
    experts = read_experts(
        config,
        {"norm_topk_prob": config.value("norm_topk_prob")},
        ["shared_expert_intermediate_size"],
        shared=size,
        shared_gate=True,
    )
    mixers = {True: GatedAttention(qkv_bias=bias, o_bias=bias), False: DeltaNet(net.shape, fused_names=True)}
    mlps = {True: MixtureOfExperts(experts), False: GatedMlp()}
    return [pre_norm(mixers[is_full], mlps[i in experts.layers]) for i, is_full in enumerate(net.is_full)]


FAMILY = Family(
    "Qwen3NextForCausalLM",
    layers,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512,
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
