"""One set of names for the operations of a decoder, whichever engine computes them.

Shapes: T tokens, Hq query heads and Hkv key-value heads of width D.

The names in the order of computation:

    embed
    layers.i.input_norm                 norm before attention
    layers.i.q_proj, k_proj, v_proj     [T, heads * D]
    layers.i.q_norm, k_norm             per head, where the model has them
    layers.i.q_rope, k_rope             after rotary embedding
    layers.i.attention                  [T, Hq * D], before the output projection
    layers.i.o_proj
    layers.i.attention_residual         the residual stream after attention
    layers.i.post_norm                  norm before the MLP
    layers.i.gate_proj, up_proj, silu_mul, down_proj
    layers.i.mlp_residual               the residual stream after the MLP
    norm, logits, logprob
"""

from typing import Any

import torch

from ..verify.trace import Trace
from .config import ModelConfig

_LAYER = (
    "input_norm",
    "q_proj",
    "k_proj",
    "v_proj",
    "q_norm",
    "k_norm",
    "q_rope",
    "k_rope",
    "attention",
    "o_proj",
    "attention_residual",
    "post_norm",
    "gate_proj",
    "up_proj",
    "silu_mul",
    "down_proj",
    "mlp_residual",
)


def in_order(trace: Trace, layers: int) -> Trace:
    """`trace` in the order of computation, without the operations that it does not hold."""
    return {name: trace[name] for name in operations(layers) if name in trace}


def output(out: Any) -> torch.Tensor:
    """The output of a module; where it returned a tuple, the first element."""
    return out[0] if isinstance(out, tuple) else out


def operations(layers: int) -> list[str]:
    """All names of a decoder, in the order of computation."""
    return [
        "embed",
        *(f"layers.{i}.{op}" for i in range(layers) for op in _LAYER),
        "norm",
        "logits",
        "logprob",
    ]


def split_fused(name: str, x: torch.Tensor, c: ModelConfig) -> dict[str, torch.Tensor]:
    """Split an output of our decoder into the outputs of the operations above, [T, width], by their names.

    The decoder computes some operations as one. The results are views of x [T, ...].
    """
    layer, _, op = name.rpartition(".")
    prefix = f"{layer}." if layer else ""
    flat = x.reshape(x.shape[0], -1)
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    splits = {
        "qkv": (("q_proj", "k_proj", "v_proj"), (q, kv, kv)),
        "qk_norm": (("q_norm", "k_norm"), (q, kv)),
        "rope": (("q_rope", "k_rope"), (q, kv)),
        "gate_up": (("gate_proj", "up_proj"), (flat.shape[1] // 2,) * 2),
    }
    names, widths = splits.get(op, ((op,), (flat.shape[1],)))
    return {prefix + n: part for n, part in zip(names, flat.split(widths, dim=1), strict=True)}
