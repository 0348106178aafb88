"""Gemma 3 (text): norms around blocks, and of heads; most layers see a window, and rotate by another base."""

from pydantic import FiniteFloat, PositiveInt

from ..blocks.attention import WINDOW_TYPES, Attention, read_windows, refuse_bidirectional
from ..blocks.embedding import root_scaled
from ..blocks.mlp import GELU, gelu_mlp
from ..blocks.residual import Layer, norms_around
from ..blocks.rope import read_local_theta
from ..config_file import ConfigFile, Fields
from ..family import Family


class _Fields(Fields):
    query_pre_attn_scalar: FiniteFloat = 256.0
    sliding_window_pattern: PositiveInt = 6


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. Refuses attention without a causal mask, other activations, and soft caps."""
    refuse_bidirectional(config)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (value := config.value(cap)) is not None:
            config.refuse(cap, value, "the published Gemma 3 have null there")
    fields, theta, bias = (
        config.read(_Fields),
        read_local_theta(config, 10000.0),
        config.fields.attention_bias,
    )
    if not fields.query_pre_attn_scalar > 0.0:
        config.wrong(f"query_pre_attn_scalar ({fields.query_pre_attn_scalar}) must be positive")
    windows = read_windows(config, fields.sliding_window_pattern)
    kinds = {
        window: norms_around(
            Attention(
                qkv_bias=bias,
                o_bias=bias,
                qk_norm=True,
                norms_heads_first=True,
                scale=fields.query_pre_attn_scalar**-0.5,
                window=window,
                local_rope_theta=theta if window else None,
            ),
            gelu_mlp(config),
        )
        for window in set(windows)
    }
    return [kinds[window] for window in windows]


FAMILY = Family(
    "Gemma3ForCausalLM",
    layers,
    defaults={
        "hidden_act": GELU,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    layer_types=WINDOW_TYPES,
    rope_by_layer_type=True,
    norm_plus_one=True,
    embedding=root_scaled,
    small={
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
)
