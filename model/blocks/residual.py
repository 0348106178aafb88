"""A layer is a row of branches:  x += block(norm(x)).

The addition of a branch's output belongs to the norm of the next branch, also of the next layer's: one kernel
computes both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...kernels.rms_norm import add_rms_norm, rms_norm
from ..operation import STREAM, Equation, Operation, Shown, Site, norm_row
from ..sizes import Sizes
from .block import Block, LayerRun, LayerWeights, Rows, Weight


@dataclass(frozen=True)
class Residual:
    """One branch of a layer."""

    norm: str  # the name of its norm in the layer
    module: str  # the name of that norm in a checkpoint, from the layer
    block: Block
    sum: str  # the name of the residual stream after it

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """The norm's, and those of the block."""
        yield Weight(self.norm, (), ((f"{self.module}.weight", c.hidden_size),))
        yield from self.block.weights(c)

    def normed(self, w: LayerWeights, rows: Rows, layer: LayerRun, summed: str) -> Rows:
        """The input of the block. summed: the name in a trace of the sum that the norm reads."""
        x, residual, context = rows
        if x is None:
            x = rms_norm(residual, w[self.norm], layer.config.eps, context.in_pass)
        else:
            x, residual = add_rms_norm(x, residual, w[self.norm], layer.config.eps, context.in_pass)
            layer.hook(summed, residual)
        layer.show(self.norm, x)
        return Rows(x, residual, context)


Layer = tuple[Residual, ...]


def pre_norm(attention: Block, mlp: Block) -> Layer:
    """The layer of Llama: attention, then an MLP."""
    return (
        Residual("input_norm", "input_layernorm", attention, "attention_residual"),
        Residual("post_norm", "post_attention_layernorm", mlp, "mlp_residual"),
    )


def layer_operations(branches: Sequence[Residual], c: Sizes) -> tuple[Operation, ...]:
    """The operations of a layer, in the order of computation."""
    rows: list[Operation] = []
    stream = STREAM
    for branch, following in zip(branches, [*branches[1:], None], strict=True):
        rows.append(
            norm_row(branch.norm, stream, c.hidden_size, branch.module, kept=c.hidden_size, kept_fp32=1)
        )
        rows += branch.block.operations(c, branch.norm)
        # Engines show the sum as the input of the norm that comes next, and after a layer as its output.
        # vLLM's norms add, and return the sum as well.
        transformers, vllm = Site(""), Site(branches[0].module, element=1, after_last="model.norm")
        if following is not None:
            transformers, vllm = Site(following.module, Shown.INPUT), Site(following.module, element=1)
        rows.append(
            Operation(
                name=branch.sum,
                equation=Equation.SUM,
                reads=(stream, rows[-1].name),
                width=c.hidden_size,
                kept=c.hidden_size,
                transformers=transformers,
                vllm=vllm,
                remedy="Compare how the engine adds to the residual stream, and in which dtype.",
            )
        )
        stream = branch.sum
    return tuple(rows)
