"""A layer is a row of branches:  x += block(norm(x)); or with a norm after the block, or a factor.

The addition of a branch's output belongs to the norm of the next branch, also of the next layer's: one kernel
computes both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...kernels.rms_norm import add_rms_norm, rms_norm
from ...kernels.scale import scale
from ..operation import STREAM, Equation, Operation, Shown, Site, norm_row
from ..sizes import Sizes
from .block import Block, LayerRun, LayerWeights, Rows, Weight


@dataclass(frozen=True)
class Residual:
    """One branch of a layer:  x += factor after(block(norm(x)))."""

    norm: str  # the name of its norm in the layer; empty where the block reads the stream
    module: str  # the name of that norm in a checkpoint, from the layer; or a module that is given the stream
    block: Block
    sum: str  # the name of the residual stream after it
    after: tuple[str, str] | None = None  # name and module of a norm of the block's output
    factor: float = 1.0

    @property
    def values(self) -> dict[str, Any]:
        """Its variants and those of the block, by name, as JSON holds them."""
        return self.block.values | ({} if self.factor == 1.0 else {"residual_multiplier": self.factor})

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """The norms', and those of the block."""
        if self.norm:
            yield Weight(self.norm, (), ((f"{self.module}.weight", c.hidden_size),))
        yield from self.block.weights(c)
        if self.after:
            name, module = self.after
            yield Weight(name, (), ((f"{module}.weight", c.hidden_size),))

    def normed(self, w: LayerWeights, rows: Rows, layer: LayerRun, summed: str) -> Rows:
        """The input of the block. summed: the name in a trace of the sum that the norm reads."""
        (x, residual, context), c = rows, layer.config
        if not self.norm:
            residual = residual if x is None else x + residual
            if x is not None:
                layer.hook(summed, residual)
            return Rows(residual, residual, context)
        norm = w[self.norm], c.eps, context.in_pass, c.norm_plus_one
        if x is None:
            x = rms_norm(residual, *norm)
        else:
            x, residual = add_rms_norm(x, residual, *norm)
            layer.hook(summed, residual)
        layer.show(self.norm, x)
        return Rows(x, residual, context)

    def forward(self, w: LayerWeights, rows: Rows, layer: LayerRun, summed: str) -> Rows:
        """What the next branch adds to the residual stream, in the place of x. summed: see `normed`."""
        rows = self.block.forward(w, self.normed(w, rows, layer, summed), layer)
        x, c = rows.x, layer.config
        if self.after:
            name, _ = self.after
            x = rms_norm(x, w[name], c.eps, rows.context.in_pass, c.norm_plus_one)
            layer.show(name, x)
        if self.factor != 1.0:
            x = scale(x, self.factor)
        return Rows(x, rows.residual, rows.context)


Layer = tuple[Residual, ...]


def pre_norm(attention: Block, mlp: Block, factor: float = 1.0) -> Layer:
    """The layer of Llama: attention, then an MLP. factor: of what each adds to the stream."""
    return (
        Residual("input_norm", "input_layernorm", attention, "attention_residual", factor=factor),
        Residual("post_norm", "post_attention_layernorm", mlp, "mlp_residual", factor=factor),
    )


def post_norm(attention: Block, mlp: Block) -> Layer:
    """The layer of OLMo 2: its blocks read the stream, and norms follow them."""
    after_attention = "post_norm", "post_attention_layernorm"
    after_mlp = "post_mlp_norm", "post_feedforward_layernorm"
    return (
        Residual("", "self_attn.q_proj", attention, "attention_residual", after_attention),
        Residual("", "mlp.gate_proj", mlp, "mlp_residual", after_mlp),
    )


def norms_around(attention: Block, mlp: Block) -> Layer:
    """The layer of Gemma 2: a norm before each block, and one after it."""
    after_attention = "post_norm", "post_attention_layernorm"
    after_mlp = "post_mlp_norm", "post_feedforward_layernorm"
    return (
        Residual("input_norm", "input_layernorm", attention, "attention_residual", after_attention),
        Residual("pre_mlp_norm", "pre_feedforward_layernorm", mlp, "mlp_residual", after_mlp),
    )


def layer_operations(branches: Sequence[Residual], c: Sizes) -> tuple[Operation, ...]:
    """The operations of a layer, in the order of computation."""
    rows: list[Operation] = []
    stream = STREAM
    for branch, following in zip(branches, [*branches[1:], None], strict=True):
        D, kept = c.hidden_size, {"kept": c.hidden_size, "kept_fp32": 1}
        if branch.norm:
            rows.append(norm_row(branch.norm, stream, D, branch.module, **kept))
        rows += branch.block.operations(c, branch.norm or stream)
        if branch.after:
            name, module = branch.after
            rows.append(norm_row(name, rows[-1].name, D, module, **kept))
        # Engines show the sum as the input of the norm that comes next, and after a layer as its output.
        # vLLM's norms add, and return the sum as well.
        transformers, vllm = Site(""), Site(branches[0].module, element=1, after_last="model.norm")
        if following is not None:
            transformers, vllm = Site(following.module, Shown.INPUT), Site(following.module, element=1)
        if not all(b.norm for b in branches) or branch.factor != 1.0:
            vllm = None
        rows.append(
            Operation(
                name=branch.sum,
                equation=Equation.SUM,
                reads=(stream, rows[-1].name),
                width=c.hidden_size,
                factor=branch.factor,
                kept=c.hidden_size,
                transformers=transformers,
                vllm=vllm,
                remedy="Compare how the engine adds to the residual stream, and in which dtype.",
            )
        )
        stream = branch.sum
    return tuple(rows)
