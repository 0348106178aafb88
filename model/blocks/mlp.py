"""The gated MLP:  y = down(silu(gate x) * up x). As in vLLM, gate and up are one matrix.

Shapes: T tokens of packed sequences, D hidden size, I intermediate size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...kernels.linear import linear
from ...kernels.silu_mul import silu_mul
from ..operation import Equation, Operation, Shown, Site, projection_row
from ..sizes import Sizes
from .block import Block, LayerRun, LayerWeights, Rows, Weight


@dataclass(frozen=True)
class GatedMlp(Block):
    """An MLP whose inner rows are gated."""

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """gate_up [2 I, D], down [D, I]."""
        D, I = c.hidden_size, c.intermediate_size
        yield Weight("gate_up", (D,), (("mlp.gate_proj.weight", I), ("mlp.up_proj.weight", I)))
        yield Weight("down", (I,), (("mlp.down_proj.weight", D),))

    def operations(self, c: Sizes, x: str) -> tuple[Operation, ...]:
        D, I = c.hidden_size, c.intermediate_size
        gate_up = {"vllm": "mlp.gate_up_proj", "fused": "gate_up", "kept": I}
        silu_mul_row = Operation(
            name="silu_mul",
            equation=Equation.SILU_MUL,
            reads=("gate_proj", "up_proj"),
            width=I,
            kept=I,
            transformers=Site("mlp.down_proj", Shown.INPUT),
            vllm=Site("mlp.act_fn"),
            remedy="Compare hidden_act, and the dtype of the activation (fused kernels may keep fewer bits).",
        )
        return (
            projection_row("gate_proj", x, D, I, "mlp.gate_proj", **gate_up),
            projection_row("up_proj", x, D, I, "mlp.up_proj", **gate_up),
            silu_mul_row,
            projection_row("down_proj", "silu_mul", I, D, "mlp.down_proj"),
        )

    def forward(self, w: LayerWeights, rows: Rows, layer: LayerRun) -> Rows:
        in_pass, tiles = rows.context.in_pass, layer.numerics.tiles
        x = linear(rows.x, w["gate_up"], None, in_pass, tiles)
        layer.show("gate_up", x)
        x = silu_mul(x)
        layer.show("silu_mul", x)
        x = linear(x, w["down"], None, in_pass, tiles)
        layer.show("down_proj", x)
        return Rows(x, rows.residual, rows.context)
