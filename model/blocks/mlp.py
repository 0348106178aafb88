"""The gated MLP:  y = down(silu(gate x) * up x), or with GELU. As in vLLM, gate and up are one matrix.

Shapes: T tokens of packed sequences, D hidden size, I intermediate size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...kernels.gelu_mul import gelu_mul
from ...kernels.linear import linear
from ...kernels.silu_mul import silu_mul
from ..config_file import ConfigFile
from ..operation import Equation, Operation, Shown, Site, projection_row
from ..sizes import Sizes
from .block import Block, LayerRun, LayerWeights, Rows, Weight

GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class GatedMlp(Block):
    """An MLP whose inner rows are gated. prefix: of the names of its weights and operations in a layer."""

    module: str = "mlp"  # in a checkpoint, from the layer
    prefix: str = ""
    size: int | None = None  # I; None is the model's intermediate size
    in_vllm: bool = True  # whether vLLM's own models show its operations under the same names
    activation: str | None = None  # of the gate: None is silu, gelu_tanh is GELU in its tanh form
    fused_names: bool | None = None  # a checkpoint has gate and up as one tensor

    @property
    def values(self) -> dict[str, Any]:
        """Its variants by name, as JSON holds them. Whoever makes it in another size says that."""
        variants = {"activation": self.activation, "fused_names": self.fused_names}
        return {name: value for name, value in variants.items() if value is not None}

    has_leaves = True

    @property
    def _gated(self) -> str:
        """The name of the operation after gate and up."""
        return "gelu_mul" if self.activation else "silu_mul"

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """gate_up [2 I, D], down [D, I]."""
        D, I, module = c.hidden_size, self.size or c.intermediate_size, self.module
        parts = (f"{module}.gate_proj.weight", I), (f"{module}.up_proj.weight", I)
        if self.fused_names:
            parts = ((f"{module}.gate_up_proj.weight", 2 * I),)
        yield Weight(f"{self.prefix}gate_up", (D,), parts, shared_rows=(I, I))
        yield Weight(f"{self.prefix}down", (I,), ((f"{module}.down_proj.weight", D),), shared_columns=True)

    def operations(self, c: Sizes, x: str) -> tuple[Operation, ...]:
        D, I, module, name = c.hidden_size, self.size or c.intermediate_size, self.module, self.prefix
        gate_up = {"vllm": f"{module}.gate_up_proj", "fused": f"{name}gate_up", "kept": I}
        gated = Operation(
            name=f"{name}{self._gated}",
            equation=Equation.GELU_MUL if self.activation else Equation.SILU_MUL,
            reads=(f"{name}gate_proj", f"{name}up_proj"),
            width=I,
            kept=I,
            transformers=Site(f"{module}.down_proj", Shown.INPUT),
            vllm=Site(f"{module}.act_fn"),
            remedy="Compare hidden_act, and the dtype of the activation (fused kernels may keep fewer bits).",
        )
        together = f"{module}.gate_up_proj" if self.fused_names else None
        rows = (
            projection_row(f"{name}gate_proj", x, D, I, together or f"{module}.gate_proj", **gate_up),
            projection_row(f"{name}up_proj", x, D, I, together or f"{module}.up_proj", **gate_up),
            gated,
            projection_row(f"{name}down_proj", gated.name, I, D, f"{module}.down_proj"),
        )
        return rows if self.in_vllm else tuple(replace(row, vllm=None) for row in rows)

    def forward(self, w: LayerWeights, rows: Rows, layer: LayerRun) -> Rows:
        in_pass, (tiles, leaves), name = rows.context.in_pass, layer.order, self.prefix
        gate_up, down = w[f"{name}gate_up"], w[f"{name}down"]
        x = linear(rows.x, gate_up, None, in_pass, tiles, leaves.outputs(*[gate_up.shape[0] // 2] * 2))
        layer.show(f"{name}gate_up", x)
        x = gelu_mul(x) if self.activation else silu_mul(x)
        layer.show(f"{name}{self._gated}", x)
        x = linear(x, down, None, in_pass, tiles, leaves.inputs(x.shape[1]))
        layer.show(f"{name}down_proj", x)
        return Rows(x, rows.residual, rows.context)


def gelu_mlp(config: ConfigFile) -> GatedMlp:
    """The MLP of a Gemma, with GELU in its tanh form. Refuses another activation."""
    if (activation := config.value("hidden_activation")) not in (None, GELU):
        config.refuse("hidden_activation", activation, f"only {GELU} is")
    return GatedMlp(activation="gelu_tanh")
