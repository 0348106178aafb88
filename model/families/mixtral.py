"""Mixtral (8x7B, 8x22B): Llama's attention, and a mixture of experts in every layer.

The softmax of the chosen experts' logits alone is the softmax of all logits, renormalised over the chosen.
"""

from ..blocks.attention import Attention
from ..blocks.experts import ExpertNames, MixtureOfExperts, read_experts
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile
from ..family import Family

_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
_IN_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. Refuses a model that attends to a sliding window."""
    window = config.value("sliding_window")
    if window is not None:
        config.refuse("sliding_window", window, "a Mixtral with full attention has null there")
    size = config.fields.intermediate_size
    decided = {"norm_topk_prob": True, "moe_intermediate_size": size, **_IN_EVERY_LAYER}
    mixture = MixtureOfExperts(read_experts(config, decided), _NAMES)
    return [pre_norm(Attention(), mixture)] * config.fields.num_hidden_layers


FAMILY = Family(
    "MixtralForCausalLM",
    layers,
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6},
    small={"intermediate_size": 224, "num_local_experts": 8, "num_experts_per_tok": 2},
)
