"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): Qwen2's attention; experts, and a shared one behind a gate."""

from pydantic import PositiveInt

from ..blocks.attention import Attention
from ..blocks.experts import MixtureOfExperts, read_experts
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile, Fields
from ..family import Family


class _Fields(Fields):
    shared_expert_intermediate_size: PositiveInt
    qkv_bias: bool = True


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer."""
    fields = config.read(_Fields)
    size = fields.shared_expert_intermediate_size
    experts = read_experts(config, known=["shared_expert_intermediate_size"], shared=size, shared_gate=True)
    attention = Attention(qkv_bias=fields.qkv_bias)
    dense, sparse = pre_norm(attention, GatedMlp()), pre_norm(attention, MixtureOfExperts(experts))
    return [sparse if i in experts.layers else dense for i in range(config.fields.num_hidden_layers)]


FAMILY = Family(
    "Qwen2MoeForCausalLM",
    layers,
    defaults={"num_key_value_heads": 16, "use_sliding_window": False},
    small={
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 160,
        "shared_expert_intermediate_size": 128,
    },
)
