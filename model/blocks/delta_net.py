"""A gated delta net: linear attention with a state, in place of attention.

    qkv, z, b, a = x in^T;   o = delta_rule(silu(conv(qkv)), a, b);   y = (norm(o) silu(z)) out^T

Shapes: T tokens of packed sequences, D hidden size; others as in kernels/delta_rule.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pydantic import PositiveInt

from ...kernels.causal_conv import causal_conv, causal_conv_after
from ...kernels.delta_rule import delta_rule, delta_rule_after
from ...kernels.gated_norm import gated_norm
from ...kernels.linear import linear
from ...kernels.recurrent_state import CHUNK, TAPS, TILE, Left, StateShape
from ..config_file import ConfigFile, Fields
from ..context import CarryingContext, NarrowingContext
from ..operation import Equation, Operation, Shown, Site, Work, projection_row
from ..sizes import Sizes
from .block import Block, LayerRun, LayerWeights, Rows, Weight

_MODULE = "linear_attn"
_LINEAR, _FULL = "linear_attention", "full_attention"
LAYER_TYPES = frozenset({_LINEAR, _FULL})
# Of config.json in a tiny hybrid: every second layer has full attention.
SMALL = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "partial_rotary_factor": 0.25,
}


class _DeltaFields(Fields):
    """The fields of a gated delta net, with the defaults of transformers."""

    linear_num_key_heads: PositiveInt = 16
    linear_num_value_heads: PositiveInt = 32
    linear_key_head_dim: PositiveInt = 128
    linear_value_head_dim: PositiveInt = 128
    linear_conv_kernel_dim: PositiveInt = TAPS
    layer_types: list[str] | None = None
    full_attention_interval: PositiveInt = 4
    attn_output_gate: bool = True


class DeltaNets(NamedTuple):
    """The gated delta nets of a config.json: their sizes, and which layers have full attention instead."""

    shape: StateShape
    is_full: list[bool]


def read_delta_net(config: ConfigFile) -> DeltaNets:
    """The gated delta nets of a model. Raises UnsupportedError for what the kernels do not compute."""
    c, n = config.read(_DeltaFields), config.fields.num_hidden_layers
    if c.linear_conv_kernel_dim != TAPS:
        config.refuse("linear_conv_kernel_dim", c.linear_conv_kernel_dim, f"only {TAPS} is")
    if not c.attn_output_gate:
        config.refuse("attn_output_gate", False, "only true is")
    if config.value("mamba_ssm_dtype") not in (None, "float32"):
        config.refuse("mamba_ssm_dtype", config.value("mamba_ssm_dtype"), "the state is in float32")
    shape = StateShape(
        c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    )
    if shape.heads % shape.key_heads:
        config.wrong(
            f"linear_num_value_heads ({shape.heads}) must be a multiple of linear_num_key_heads "
            f"({shape.key_heads})"
        )
    interval = c.full_attention_interval
    kinds = c.layer_types or [_LINEAR if (i + 1) % interval else _FULL for i in range(n)]
    if len(kinds) != n or not {_FULL} <= set(kinds) <= LAYER_TYPES:
        config.refuse(
            "layer_types",
            kinds,
            f"num_hidden_layers ({n}) of {_LINEAR} and {_FULL} are, with one of {_FULL} at least",
        )
    return DeltaNets(shape, [kind == _FULL for kind in kinds])


@dataclass(frozen=True)
class DeltaNet(Block):
    """A gated delta net with its projections."""

    shape: StateShape
    fused_names: bool = False  # a checkpoint has two tensors of the inputs, interleaved by key head

    @property
    def values(self) -> dict[str, Any]:
        """Its sizes, as JSON holds them."""
        return {"delta_net": self.shape._asdict() | ({"fused_names": True} if self.fused_names else {})}

    @property
    def _inputs(self) -> dict[str, int]:
        """The rows of the projections of the input, by the names of their tensors in a checkpoint."""
        s, z = self.shape, self.shape.heads * self.shape.V
        if self.fused_names:
            return {"qkvz": s.channels + z, "ba": 2 * s.heads}
        return {"qkv": s.channels, "z": z, "b": s.heads, "a": s.heads}

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """delta_in [rows, D], conv [channels, 1, TAPS], A_log and dt_bias [H], gated_norm [V], delta_out."""
        s, D = self.shape, c.hidden_size
        parts = tuple((f"{_MODULE}.in_proj_{p}.weight", n) for p, n in self._inputs.items())
        yield Weight("delta_in", (D,), parts)
        yield Weight("conv", (1, TAPS), ((f"{_MODULE}.conv1d.weight", s.channels),))
        yield Weight("A_log", (), ((f"{_MODULE}.A_log", s.heads),))
        yield Weight("dt_bias", (), ((f"{_MODULE}.dt_bias", s.heads),))
        yield Weight("gated_norm", (), ((f"{_MODULE}.norm.weight", s.V),))
        yield Weight("delta_out", (s.heads * s.V,), ((f"{_MODULE}.out_proj.weight", D),))

    def operations(self, c: Sizes, x: str) -> tuple[Operation, ...]:
        s, D, width = self.shape, c.hidden_size, self.shape.heads * self.shape.V
        projected = [
            projection_row(f"in_{p}", x, D, n, f"{_MODULE}.in_proj_{p}", fused="delta_in", kept=n)
            for p, n in self._inputs.items()
        ]
        first, last = projected[0].name, projected[-1].name
        gates = (last,) if self.fused_names else ("in_b", "in_a")
        z = first if self.fused_names else "in_z"
        # The state's products, the pairs within a chunk, and the open tile's inverse, of each head.
        products = s.heads * (3 * s.K * s.V + 2 * CHUNK * (s.K + s.V) + TILE * s.V)
        inside = {"transformers": None, "vllm": None}
        return (
            *projected,
            Operation(
                name="conv",
                equation=Equation.CONV_SILU,
                reads=(first,),
                width=s.channels,
                kept=s.channels,
                remedy="Compare the convolution's weight, and what it reads before a sequence's first token.",
                **inside,
            ),
            Operation(
                name="delta_rule",
                equation=Equation.DELTA_RULE,
                reads=("conv", *gates),
                width=width,
                kept=width,
                flops=Work(tokens=2 * products),
                remedy="Compare the dtype of the state, A_log and dt_bias, and where a chunk begins.",
                **inside,
            ),
            Operation(
                name="gated_norm",
                equation=Equation.GATED_NORM,
                reads=("delta_rule", z),
                width=width,
                kept=width,
                transformers=Site(f"{_MODULE}.out_proj", Shown.INPUT),
                vllm=None,
                remedy="Compare the norm's weight and its epsilon, and where the product is rounded.",
            ),
            projection_row("delta_out", "gated_norm", width, D, f"{_MODULE}.out_proj"),
        )

    def forward(self, w: LayerWeights, rows: Rows, layer: LayerRun) -> Rows:
        s, context, tiles = self.shape, rows.context, layer.numerics.tiles
        segments, state, in_pass = context.segments, context.state(layer.i), context.in_pass
        y = linear(rows.x, w["delta_in"], None, in_pass, tiles)
        layer.show("delta_in", y)
        qkv, z, b, a = self._split(y)
        gates = a, b, w["A_log"], w["dt_bias"]
        before = context.before(layer.i) if isinstance(context, CarryingContext) else None
        if before is None:
            qkv = causal_conv(qkv, w["conv"], segments, state, in_pass)
            o = delta_rule(qkv, *gates, segments, s, state, in_pass)
        else:
            qkv, last = causal_conv_after(qkv, w["conv"], before.conv, segments, in_pass)
            o, *left = delta_rule_after(qkv, *gates, before, segments, s, in_pass)
            context.leave(layer.i, Left(last, *left))
        layer.show("conv", qkv)
        layer.show("delta_rule", o)
        if layer.is_last and isinstance(context, NarrowingContext):
            o, z = context.narrow(o), context.narrow(z)
            rows = rows.narrowed(o)
            in_pass = rows.context.in_pass
        x = gated_norm(o, z.unflatten(1, (s.heads, s.V)), w["gated_norm"], layer.config.eps, in_pass)
        layer.show("gated_norm", x)
        x = linear(x.flatten(1), w["delta_out"], None, in_pass, tiles)
        layer.show("delta_out", x)
        return Rows(x, rows.residual, rows.context)

    def _split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """qkv, z, b and a of the projected input."""
        parts = y.split([*self._inputs.values()], 1)
        return (*self.split_qkvz(parts[0]), *self.split_ba(parts[1])) if self.fused_names else parts

    def split_qkvz(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """qkv and z of the first fused projection, whose elements go by key heads."""
        s, values = self.shape, self.shape.heads // self.shape.key_heads * self.shape.V
        q, k, v, z = x.unflatten(1, (s.key_heads, -1)).split([s.K, s.K, values, values], 2)
        return torch.cat([part.flatten(1) for part in (q, k, v)], 1), z.flatten(1)

    def split_ba(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """b and a of the second fused projection."""
        return tuple(part.flatten(1) for part in x.unflatten(1, (self.shape.key_heads, -1)).chunk(2, 2))
