"""gpt-oss (20B, 120B): attention sinks, every other layer sees a window, and clamped experts with biases.

Published checkpoints hold the experts in MXFP4. They are read as the numbers that they stand for, and written
in the dtype of the weights.
"""

from pydantic import FiniteFloat, PositiveInt

from ..blocks.attention import WINDOW_TYPES, Attention, read_windows
from ..blocks.clamped_experts import ClampedExperts
from ..blocks.experts import read_experts
from ..blocks.residual import Layer, pre_norm
from ..config_file import ConfigFile, Fields
from ..family import Family


class _Fields(Fields):
    num_local_experts: PositiveInt = 128
    num_experts_per_tok: PositiveInt = 4
    swiglu_alpha: FiniteFloat = 1.702
    swiglu_limit: FiniteFloat = 7.0


def layers(config: ConfigFile) -> list[Layer]:
    """The blocks of each layer. Refuses a file without a rotary embedding, or with two different values."""
    common, fields = config.fields, config.read(_Fields)
    rope = common.rope_parameters or common.rope_scaling
    if not rope:
        config.wrong("rope_parameters and rope_scaling are missing; libraries differ in what they then take")
    decided = {
        "num_experts": fields.num_local_experts,
        "num_experts_per_tok": fields.num_experts_per_tok,
        "moe_intermediate_size": common.intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    repeated = {
        "experts_per_token": fields.num_experts_per_tok,
        "initial_context_length": rope.get("original_max_position_embeddings"),
    }
    for name, value in (decided | repeated).items():
        if (given := config.raw.get(name)) not in (None, value):
            config.refuse(name, given, f"{value} is what the architecture, or another field, says")
    for name in ("swiglu_alpha", "swiglu_limit"):
        if not getattr(fields, name) > 0.0:
            config.wrong(f"{name} ({getattr(fields, name)}) must be positive")
    mixture = ClampedExperts(
        read_experts(config, decided), alpha=fields.swiglu_alpha, limit=fields.swiglu_limit
    )
    bias, windows = common.attention_bias, read_windows(config, period=2)
    kinds = {
        window: pre_norm(Attention(qkv_bias=bias, o_bias=bias, sinks=True, window=window), mixture)
        for window in set(windows)
    }
    return [kinds[window] for window in windows]


FAMILY = Family(
    "GptOssForCausalLM",
    layers,
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "attention_bias": True,
    },
    layer_types=WINDOW_TYPES,
    dequantised="mxfp4",
    small={
        "intermediate_size": 160,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "swiglu_limit": 1.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
)
