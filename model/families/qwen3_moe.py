"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in all layers or in some."""

from ..blocks.attention import Attention
from ..blocks.experts import MixtureOfExperts, read_experts
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile
from ..family import Family


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. Refuses experts that are shared, and another router."""
    experts, bias = read_experts(config), config.fields.attention_bias
    attention = Attention(qkv_bias=bias, o_bias=bias, qk_norm=True)
    dense, sparse = pre_norm(attention, GatedMlp()), pre_norm(attention, MixtureOfExperts(experts))
    return [sparse if i in experts.layers else dense for i in range(config.fields.num_hidden_layers)]


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    layers,
    defaults={"num_key_value_heads": 4, "use_sliding_window": False},
    small={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 224, "norm_topk_prob": True},
    vllm_exact=True,
)
