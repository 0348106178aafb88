"""Phi-3 and Phi-4: Llama's layer. q, k and v are one tensor, and so are gate and up; heads rotate in part."""

from ..blocks.attention import Attention
from ..blocks.mlp import GatedMlp
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile
from ..family import Family


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. Refuses dropout, and a sliding window that a sequence can outgrow."""
    for name in ("resid_pdrop", "embd_pdrop"):
        if dropout := config.value(name):
            config.refuse(name, dropout, "the policy that is trained must be the policy that was sampled")
    window, positions = config.value("sliding_window"), config.fields.max_position_embeddings
    if window is not None and not (type(window) is int and window >= positions):
        config.refuse(
            "sliding_window", window, f"it must be null, or not below max_position_embeddings ({positions})"
        )
    layer = pre_norm(Attention(fused_names=True), GatedMlp(fused_names=True))
    return [layer] * config.fields.num_hidden_layers


FAMILY = Family(
    "Phi3ForCausalLM",
    layers,
    defaults={"original_max_position_embeddings": 4096},
    rope_types={"su": "longrope", "yarn": "longrope"},
    partial_rotary=True,
    small={"partial_rotary_factor": 0.75},
)
