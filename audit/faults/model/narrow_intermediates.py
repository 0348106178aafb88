"""A fused rotary embedding or activation that keeps its intermediates in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from ....files.dtypes import dtype_name
from ....kernels.rope import rope_table
from ....model.context import Hook, PackedContext
from ....model.decoder import Decoder
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ...hypotheses.scores import decoder_scores
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The rotary embedding, the activation, and both, in bf16 and fp16."""
    model = evidence.scorer.model()
    parts = {"rotary embedding": ("rope",), "activation": ("silu_mul",)}
    parts["rotary embedding and activation"] = ("rope", "silu_mul")
    c = model.config
    if c.rotary_dim != c.head_dim or any(c.local_rope_thetas):  # the hook rotates whole heads, by one base
        parts = {"activation": parts["activation"]}
    for dtype in (torch.bfloat16, torch.float16):
        for words, ops in parts.items():
            scores = decoder_scores(model, evidence, hook_of=_narrowing(model, ops, dtype))
            name = dtype_name(dtype)
            yield Prediction(f"intermediates of the sampler's {words} are in {name}", scores)


def _narrowing(decoder: Decoder, ops: tuple[str, ...], dtype: torch.dtype) -> Callable[[PackedContext], Hook]:
    """A hook that computes `ops` again in `dtype`, and writes the result over the decoder's own output."""

    def hook_of(context: PackedContext) -> Hook:
        cos, sin = _rows_of_table(decoder, context.positions, dtype)
        inputs: dict[str, torch.Tensor] = {}

        def hook(name: str, x: torch.Tensor) -> None:
            op = name.rpartition(".")[2]
            if op == "rope" and op in ops:
                before = inputs.get("qk_norm", inputs["qkv"])[:, : x.shape[1]]
                x.copy_(_rotated(before.to(dtype), cos, sin))
            elif op == "silu_mul" and op in ops:
                g, u = inputs["gate_up"].to(dtype).chunk(2, dim=-1)
                x.copy_(torch.nn.functional.silu(g) * u)
            inputs[op] = x

        return hook

    return hook_of


def _rows_of_table(
    decoder: Decoder, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the positions, [T, 1, D / 2]."""
    c = decoder.config
    tables = rope_table(c.frequencies, c.max_positions, dtype)
    return tuple(t[positions.cpu()].to(decoder.device).unsqueeze(1) for t in tables)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] rotated, every product and sum rounded to the dtype of x."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class _NarrowMlp(torch.nn.Module):
    """transformers' gated MLP, whose fused activation computes in bf16."""

    def __init__(self, mlp: torch.nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        g, u = self.mlp.gate_proj(x).bfloat16(), self.mlp.up_proj(x).bfloat16()
        return self.mlp.down_proj((torch.nn.functional.silu(g) * u).to(x.dtype))


def a_fused_activation(w: World) -> Log:
    """An engine in fp32 whose fused activation keeps bf16."""
    model = w.model(dtype=w.exact)
    for layer in model.model.layers:
        layer.mlp = _NarrowMlp(layer.mlp)
    return w.sampler(model)


FAULT = Predicted(
    name="16-bit intermediates",
    order=360,
    predict=predict,
    needs_decoder=True,
    remedy="Switch the fused kernel off (Megatron: apply_rope_fusion, bias_activation_fusion), or let both "
    "sides use it.",
    tries="a fused rotary embedding or activation that computes in bf16 or fp16",
    known_from=("NVIDIA-NeMo/RL#1801",),
    is_rounding=True,
    plants=(Plant(group="attention", make=a_fused_activation),),
)
