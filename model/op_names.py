"""One set of names for the operations of a decoder, whoever computes them.

In the order of computation; Hq, Hkv heads of width D, I the width of the MLP, T tokens:

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


def in_order(found: Trace, layers: int) -> Trace:
    """A trace in the order of computation; operations that a model does not have are left out."""
    return {name: found[name] for name in operations(layers) if name in found}


def output(out: Any) -> torch.Tensor:
    """What a module returned, of a tuple the first."""
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
    """The outputs [T, width] of the operations that our decoder computes as one, by the names above; views of
    x [T, ...].
    """
    at, _, op = name.rpartition(".")
    at = f"{at}." if at else ""
    flat = x.reshape(x.shape[0], -1)
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    splits = {
        "qkv": (("q_proj", "k_proj", "v_proj"), (q, kv, kv)),
        "qk_norm": (("q_norm", "k_norm"), (q, kv)),
        "rope": (("q_rope", "k_rope"), (q, kv)),
        "gate_up": (("gate_proj", "up_proj"), (flat.shape[1] // 2,) * 2),
    }
    names, widths = splits.get(op, ((op,), (flat.shape[1],)))
    return {at + n: part for n, part in zip(names, flat.split(widths, dim=1), strict=True)}
