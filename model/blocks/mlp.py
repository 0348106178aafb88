"""The gated MLP:  y = down(silu(gate x) * up x), or with GELU. As in vLLM, gate and up are one matrix.

Shapes: T tokens of packed sequences, D hidden size, I intermediate size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...kernels.gelu_mul import gelu_mul
from ...kernels.linear import linear
from ...kernels.silu_mul import silu_mul
from ..operation import Equation, Operation, Shown, Site, projection_row
from ..sizes import Sizes
from .block import Block, LayerRun, LayerWeights, Rows, Weight


@dataclass(frozen=True)
class GatedMlp(Block):
    """An MLP whose inner rows are gated."""

    activation: str | None = None  # of the gate: None is silu, gelu_tanh is GELU in its tanh form
    fused_names: bool | None = None  # a checkpoint has gate and up as one tensor

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """gate_up [2 I, D], down [D, I]."""
        D, I = c.hidden_size, c.intermediate_size
        parts = ("mlp.gate_proj.weight", I), ("mlp.up_proj.weight", I)
        if self.fused_names:
            parts = (("mlp.gate_up_proj.weight", 2 * I),)
        yield Weight("gate_up", (D,), parts)
        yield Weight("down", (I,), (("mlp.down_proj.weight", D),))

    def operations(self, c: Sizes, x: str) -> tuple[Operation, ...]:
        D, I = c.hidden_size, c.intermediate_size
        gate_up = {"vllm": "mlp.gate_up_proj", "fused": "gate_up", "kept": I}
        gated = "gelu_mul" if self.activation else "silu_mul"
        gated_row = Operation(
            name=gated,
            equation=Equation.GELU_MUL if self.activation else Equation.SILU_MUL,
            reads=("gate_proj", "up_proj"),
            width=I,
            kept=I,
            transformers=Site("mlp.down_proj", Shown.INPUT),
            vllm=Site("mlp.act_fn"),
            remedy="Compare hidden_act, and the dtype of the activation (fused kernels may keep fewer bits).",
        )
        return (
            *(
                projection_row(p, x, D, I, "mlp.gate_up_proj" if self.fused_names else f"mlp.{p}", **gate_up)
                for p in ("gate_proj", "up_proj")
            ),
            gated_row,
            projection_row("down_proj", gated, I, D, "mlp.down_proj"),
        )

    def forward(self, w: LayerWeights, rows: Rows, layer: LayerRun) -> Rows:
        in_pass, tiles = rows.context.in_pass, layer.numerics.tiles
        x = linear(rows.x, w["gate_up"], None, in_pass, tiles)
        layer.show("gate_up", x)
        if self.activation:
            x = gelu_mul(x)
            layer.show("gelu_mul", x)
        else:
            x = silu_mul(x)
            layer.show("silu_mul", x)
        x = linear(x, w["down"], None, in_pass, tiles)
        layer.show("down_proj", x)
        return Rows(x, rows.residual, rows.context)
