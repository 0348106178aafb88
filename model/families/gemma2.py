"""Gemma 2: norms around blocks; every other layer sees a window; scores and logits are soft-capped."""

from pydantic import FiniteFloat

from ..blocks.attention import WINDOW_TYPES, Attention, read_windows, refuse_bidirectional
from ..blocks.embedding import Head, root_scaled
from ..blocks.mlp import GELU, gelu_mlp
from ..blocks.residual import Layer, norms_around
from ..config_file import ConfigFile, Fields
from ..family import Family


class _Fields(Fields):
    query_pre_attn_scalar: FiniteFloat = 256.0


def _cap(config: ConfigFile, name: str) -> float:
    """A soft cap; 0.0 where config.json has null. Refuses one that is not positive."""
    value = config.value(name)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < float("inf"):
        config.refuse(name, value, "it must be a positive number, or null for none")
    return float(value)


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. Refuses attention without a causal mask, and another activation."""
    refuse_bidirectional(config)
    scalar, bias = config.read(_Fields).query_pre_attn_scalar, config.fields.attention_bias
    if not scalar > 0.0:
        config.wrong(f"query_pre_attn_scalar ({scalar}) must be positive")
    windows, cap = read_windows(config, period=2), _cap(config, "attn_logit_softcapping") or None
    kinds = {
        window: norms_around(
            Attention(qkv_bias=bias, o_bias=bias, scale=scalar**-0.5, window=window, cap=cap),
            gelu_mlp(config),
        )
        for window in set(windows)
    }
    return [kinds[window] for window in windows]


FAMILY = Family(
    "Gemma2ForCausalLM",
    layers,
    defaults={
        "hidden_act": GELU,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    layer_types=WINDOW_TYPES,
    norm_plus_one=True,
    embedding=root_scaled,
    head=lambda config: Head(cap=_cap(config, "final_logit_softcapping")),
    small={
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
)
