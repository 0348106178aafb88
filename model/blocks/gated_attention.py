"""Attention behind a gate:  y = (attention(q, k, v) sigmoid(gate)) o^T.

q_proj gives each query head and its gate side by side. Norms of heads multiply by 1 + w. Shapes: T tokens of
packed sequences, D width of a head, Hq query heads, Hkv key-value heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...kernels.linear import linear
from ...kernels.qk_norm import qk_norm
from ...kernels.rope import rope
from ...kernels.sigmoid_mul import sigmoid_mul
from ..context import Context, NarrowingContext
from ..kv_rounding import rounded_kv
from ..operation import Equation, Operation, Shown, Site
from ..sizes import Sizes
from .attention import Attention
from .block import LayerRun, LayerWeights, Rows, Weight


@dataclass(frozen=True)
class GatedAttention(Attention):
    """Attention whose output a sigmoid multiplies, with norms of query and key heads."""

    qk_norm: bool | None = True
    gated: bool | None = True

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """As in Attention, with the rows of a gate beside those of each query head."""
        for weight in super().weights(c):
            parts = tuple((name, n * (1 + (".q_proj." in name))) for name, n in weight.parts)
            yield weight._replace(parts=parts)

    def operations(self, c: Sizes, x: str) -> tuple[Operation, ...]:
        q, *others, attended, output = super().operations(c, x)
        flops = q.flops._replace(tokens=2 * q.flops.tokens)
        gate = Operation(
            name="attention_gate",
            equation=Equation.MUL_SIGMOID,
            reads=("attention", "q_proj"),
            width=attended.width,
            kept=attended.width,
            transformers=Site("self_attn.o_proj", Shown.INPUT),
            vllm=None,
            remedy="Compare which half of a head's rows is its gate, and where the product is rounded.",
        )
        return (
            replace(q, width=2 * q.width, kept=2 * q.width, flops=flops),
            *others,
            replace(attended, transformers=None),
            gate,
            replace(output, reads=(gate.name,)),
        )

    def forward(self, w: LayerWeights, rows: Rows, layer: LayerRun) -> Rows:
        context, numerics = rows.context, layer.numerics
        *qkv, gate = self._projected(w, rows.x, layer, context)
        o = context.attend(layer.i, *qkv, self._scale(layer.config), numerics.attention)
        layer.show("attention", o)
        if layer.is_last:
            rows = rows.narrowed(o)
            gate = context.narrow(gate) if isinstance(context, NarrowingContext) else gate
        x = sigmoid_mul(o.flatten(1), gate)
        layer.show("attention_gate", x)
        x = linear(x, w["o"], w.get("o_bias"), rows.context.in_pass, numerics.tiles)
        layer.show("o_proj", x)
        return Rows(x, rows.residual, rows.context)

    def _qkv(
        self, w: LayerWeights, x: torch.Tensor, layer: LayerRun, context: Context
    ) -> tuple[torch.Tensor, ...]:
        return self._projected(w, x, layer, context)[:3]

    def _projected(
        self, w: LayerWeights, x: torch.Tensor, layer: LayerRun, context: Context
    ) -> tuple[torch.Tensor, ...]:
        """q [T, Hq, D], k and v [T, Hkv, D] as attention reads them, and the gate [T, Hq D]."""
        c, heads = layer.config, self._heads(w, x, layer, context)
        layer.show("qkv", heads)
        pairs, k, v = heads.split([2 * c.heads, c.kv_heads, c.kv_heads], dim=1)
        q, gate = pairs.unflatten(1, (c.heads, 2)).unbind(2)
        qk = qk_norm(
            torch.cat([q, k], 1), w["q_norm"], w["k_norm"], c.heads, c.eps, context.in_pass, c.norm_plus_one
        )
        layer.show("qk_norm", qk)
        qk = rope(qk, *layer.rotation)
        layer.show("rope", qk)
        q, k = qk.split([c.heads, c.kv_heads], dim=1)
        return q, rounded_kv(k, layer.numerics), rounded_kv(v, layer.numerics), gate.flatten(1)
