"""The gated MLP:  y = down(silu(gate x) * up x). As in vLLM, gate and up are one matrix.

Shapes: T tokens of packed sequences, D hidden size, I intermediate size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...kernels.linear import linear
from ...kernels.silu_mul import silu_mul
from ..operation import Equation, Operation, Shown, Site, projection_row
from ..sizes import Sizes
from .block import Block, LayerRun, LayerWeights, Rows, Weight


@dataclass(frozen=True)
class GatedMlp(Block):
    """An MLP whose inner rows are gated. prefix: of the names of its weights and operations in a layer."""

    module: str = "mlp"  # in a checkpoint, from the layer
    prefix: str = ""
    size: int | None = None  # I; None is the model's intermediate size
    in_vllm: bool = True  # whether vLLM's own models show its operations under the same names

    @property
    def values(self) -> dict[str, Any]:
        """None: whoever makes it in another size says so."""
        return {}

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """gate_up [2 I, D], down [D, I]."""
        D, I, module = c.hidden_size, self.size or c.intermediate_size, self.module
        gate_up = ((f"{module}.gate_proj.weight", I), (f"{module}.up_proj.weight", I))
        yield Weight(f"{self.prefix}gate_up", (D,), gate_up)
        yield Weight(f"{self.prefix}down", (I,), ((f"{module}.down_proj.weight", D),))

    def operations(self, c: Sizes, x: str) -> tuple[Operation, ...]:
        D, I, module, name = c.hidden_size, self.size or c.intermediate_size, self.module, self.prefix
        gate_up = {"vllm": f"{module}.gate_up_proj", "fused": f"{name}gate_up", "kept": I}
        silu_mul_row = Operation(
            name=f"{name}silu_mul",
            equation=Equation.SILU_MUL,
            reads=(f"{name}gate_proj", f"{name}up_proj"),
            width=I,
            kept=I,
            transformers=Site(f"{module}.down_proj", Shown.INPUT),
            vllm=Site(f"{module}.act_fn"),
            remedy="Compare hidden_act, and the dtype of the activation (fused kernels may keep fewer bits).",
        )
        rows = (
            projection_row(f"{name}gate_proj", x, D, I, f"{module}.gate_proj", **gate_up),
            projection_row(f"{name}up_proj", x, D, I, f"{module}.up_proj", **gate_up),
            silu_mul_row,
            projection_row(f"{name}down_proj", f"{name}silu_mul", I, D, f"{module}.down_proj"),
        )
        return rows if self.in_vllm else tuple(replace(row, vllm=None) for row in rows)

    def forward(self, w: LayerWeights, rows: Rows, layer: LayerRun) -> Rows:
        in_pass, tiles, name = rows.context.in_pass, layer.numerics.tiles, self.prefix
        x = linear(rows.x, w[f"{name}gate_up"], None, in_pass, tiles)
        layer.show(f"{name}gate_up", x)
        x = silu_mul(x)
        layer.show(f"{name}silu_mul", x)
        x = linear(x, w[f"{name}down"], None, in_pass, tiles)
        layer.show(f"{name}down_proj", x)
        return Rows(x, rows.residual, rows.context)
