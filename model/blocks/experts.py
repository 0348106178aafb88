"""The mixture of experts of a sparse layer.

    logits = x router^T;   q, ids = top-k of softmax(logits);   y = sum over the k experts of q mlp(x)
    or q, ids = by sigmoid(logits), and a bias that corrects the choice (kernels/sigmoid_router.py)
    or ids = top-k of the logits in the best groups;   q = f softmax(logits) of them
    y += shared(x), or sigmoid(x shared_gate^T) shared(x), where the model has a shared expert

The sum over the chosen experts is rounded before the shared expert's output is added.
The experts of a layer are two weights, whose rows are those of the experts' matrices one after another.
Shapes: T tokens of packed sequences, D hidden size, E experts.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from pydantic import Field, PositiveInt

from ...kernels.add_shared import add_shared
from ...kernels.combine_experts import combine_experts
from ...kernels.expert_rows import Rows as ExpertRowsOf
from ...kernels.expert_rows import expert_rows
from ...kernels.given_softmax import given_softmax
from ...kernels.grad import accumulate_dtype
from ...kernels.grouped_linear import grouped_linear
from ...kernels.linear import linear
from ...kernels.passes import Pass
from ...kernels.shared_experts import SharedExperts
from ...kernels.sigmoid_router import Choice, Weighing, sigmoid_choice, sigmoid_weights
from ...kernels.silu_mul import silu_mul
from ...kernels.tile_tables import TileTable
from ...kernels.topk_softmax import topk_of_groups, topk_softmax
from ..buffers import BYTES, as_numbers
from ..config_file import ConfigFile, Fields
from ..numerics import Numerics
from ..operation import Equation, Operation, Site, Work, projection_row
from ..routing import Routing
from ..sizes import Experts, Sizes
from .block import Block, LayerRun, LayerWeights, Rows, Weight
from .mlp import GatedMlp

# Fields of other mixtures of experts, each with the values that ask for nothing more than ours computes.
_OTHER_EXPERTS: dict[str, tuple[object, ...]] = {
    "shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1.0,),
    "moe_router_use_sigmoid": (False,),
    "use_routing_bias": (False,),
    "router_jitter_noise": (0.0,),
}
# transformers' and vLLM's own models have a mixture here, whatever a checkpoint calls it.
_MODULE = "mlp"
_SHARED_GATE = "shared_expert_gate"
LOGITS_BIAS = "logits_bias"  # of the router, in the layer, where it has one
# Of a layer, and of all layers together. Every matrix of an expert has a name and a place.
_MOST_EXPERTS, _MOST_OF_ALL_LAYERS = 1 << 12, 1 << 17


class _ExpertFields(Fields):
    """The fields of a mixture of experts. transformers 5 writes num_local_experts for num_experts."""

    num_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    moe_intermediate_size: PositiveInt
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: list[int] = Field(default_factory=list)


def read_experts(
    config: ConfigFile,
    decided: Mapping[str, Any] = MappingProxyType({}),
    known: Collection[str] = (),
    **others: Any,
) -> Experts:
    """The experts of a config.json.

    decided: fields that the family gives a value to, whatever the file has under this name. known: fields
    that the family reads itself. others: fields of Experts that the family decides.

    Raises UnsupportedError for any other field that asks for shared experts or for another router.
    """
    raw, layers = config.raw, config.fields.num_hidden_layers
    for field, values in _OTHER_EXPERTS.items():
        if raw.get(field) is not None and raw[field] not in values and field not in known:
            config.refuse(
                field,
                raw[field],
                "only experts that a softmax chooses for each token are, without shared ones",
            )
    numbers = {raw.get(name) for name in ("num_experts", "num_local_experts")} - {None}
    if len(numbers) > 1:
        config.wrong("num_experts and num_local_experts differ, and libraries differ in which they read")
    named = {"num_experts": raw.get("num_local_experts")}
    named |= {name: value for name, value in raw.items() if value is not None}
    fields = config.read(_ExpertFields, named | dict(decided))
    number, per_token = fields.num_experts, fields.num_experts_per_tok
    if per_token > number or number > _MOST_EXPERTS:
        config.wrong(
            f"num_experts_per_tok ({per_token}) must be at most num_experts ({number}), and "
            f"num_experts at most {_MOST_EXPERTS}"
        )
    step, dense = fields.decoder_sparse_step, set(fields.mlp_only_layers)
    sparse = frozenset(i for i in range(layers) if (i + 1) % step == 0 and i not in dense)
    if number * len(sparse) > _MOST_OF_ALL_LAYERS:
        config.wrong(
            f"num_experts ({number}) in {len(sparse)} layers are more than zerokl takes "
            f"({_MOST_OF_ALL_LAYERS})"
        )
    size, renormalise = fields.moe_intermediate_size, fields.norm_topk_prob
    return Experts(number, per_token, size, renormalise, sparse, **others)


class ExpertNames(NamedTuple):
    """How a checkpoint names a mixture. module: what holds the router and the experts, from the layer."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"  # in the module, where there is one


QWEN = ExpertNames()


@dataclass(frozen=True)
class MixtureOfExperts(Block):
    """A router, and the experts that it chooses for each token."""

    experts: Experts
    names: ExpertNames = QWEN

    @property
    def values(self) -> dict[str, Any]:
        return {"experts": self.experts.as_json()}

    @property
    def bias_name(self) -> str:
        """The name of a sigmoid router's correction bias in a checkpoint, from the layer."""
        return f"{self.names.module}.gate.e_score_correction_bias"

    def matrices_of(self, e: int) -> tuple[str, str, str]:
        """The names of gate, up and down of expert e in a checkpoint, from the layer."""
        names = self.names
        matrices = (f"{names.module}.experts.{e}.{p}.weight" for p in (names.gate, names.up, names.down))
        return tuple(matrices)

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """router [E, D]; experts.gate_up, those of gate and up in turn; experts.down."""
        D, (number, size) = c.hidden_size, (self.experts.number, self.experts.size)
        router = f"{self.names.module}.gate.weight"
        in_transformers = None if self.names.module == _MODULE else (f"{_MODULE}.gate.weight", (number, D))
        yield Weight("router", (D,), ((router, number),), in_transformers)
        if self.experts.sigmoid:
            yield Weight("router_bias", (), ((self.bias_name, BYTES * number),), is_buffer=True)
        number //= c.expert_ranks
        matrices = [self.matrices_of(e) for e in range(number)]
        gate_up = tuple((name, size) for gate, up, _ in matrices for name in (gate, up))
        together = f"{_MODULE}.experts.gate_up_proj", (number, 2 * size, D)
        yield Weight("experts.gate_up", (D,), gate_up, together, packable=False, by_expert=True)
        together = f"{_MODULE}.experts.down_proj", (number, D, size)
        down = tuple((name, D) for *_, name in matrices)
        yield Weight("experts.down", (size,), down, together, packable=False, by_expert=True)
        if self.experts.shared:
            yield from self._shared.weights(c)
        if self.experts.shared_gate:
            yield Weight("shared_gate", (D,), ((f"{self.names.module}.{_SHARED_GATE}.weight", 1),))

    def dtypes(self, numerics: Numerics, compute: torch.dtype) -> dict[str, torch.dtype | None]:
        return {"router": self._logits_dtype(numerics, compute)}

    def _logits_dtype(self, numerics: Numerics, compute: torch.dtype) -> torch.dtype | None:
        """The dtype of the router's logits; None is the compute dtype.

        Those of DeepSeek's routers are in fp32 always, from a weight in the compute dtype.
        """
        return accumulate_dtype(compute) if self.experts.grouped else numerics.router

    def operations(self, c: Sizes, x: str) -> tuple[Operation, ...]:
        D, (number, size, per_token) = (
            c.hidden_size,
            (self.experts.number, self.experts.size, self.experts.per_token),
        )
        router = projection_row(
            "router",
            x,
            D,
            number,
            f"{_MODULE}.gate",
            weight=f"{self.names.module}.gate",
            # Logits in fp32 keep what they are computed from in fp32.
            kept_fp32=number + (D if self.experts.grouped else 0),
            remedy="Compare the router's weight in the engine's memory with the checkpoint's, and its dtype.",
        )
        experts = Operation(
            name="experts",
            equation=Equation.EXPERTS,
            reads=(x, "router"),
            width=D,
            flops=Work(tokens=6 * D * size * per_token),
            # Gate, up and their product for each expert of a token; ids, routing weights and tables of the
            # rows. On a GPU these take 5 numbers of 4 bytes for each expert. Ranks that share experts have a
            # part of the rows, and copies of their x.
            kept=(3 * size + (D if c.expert_ranks > 1 else 0)) * per_token // c.expert_ranks,
            kept_fp32=9 * per_token,
            transformers=Site(f"{_MODULE}.experts"),
            vllm=Site(f"{_MODULE}.experts"),
            remedy=(
                "Compare the chosen experts, the rounding of the routing weights, and the order of the sum."
            ),
        )
        return router, experts, *self._shared_operations(D, c, x)

    def _shared_operations(self, D: int, c: Sizes, x: str) -> Iterator[Operation]:
        """Those of the shared expert, the last of which adds what it gives to what the others give."""
        if not self.experts.shared:
            return
        yield from self._shared.operations(c, x)
        added = ("experts", "shared_down_proj")
        if self.experts.shared_gate:
            gate = projection_row("shared_gate", x, D, 1, f"{_MODULE}.{_SHARED_GATE}", kept=1)
            yield replace(gate, vllm=None)
            added = (*added, "shared_gate")
        yield Operation(
            name="mixture",
            equation=Equation.ADD_GATED if self.experts.shared_gate else Equation.SUM,
            reads=added,
            width=D,
            kept=D if self.experts.shared_gate else 0,
            # Both show it as the output of the module that a dense layer's MLP has, too.
            transformers=None,
            vllm=None,
            remedy="Compare the shared expert's gate, and where the sum of both is rounded.",
        )

    @property
    def _shared(self) -> GatedMlp:
        """The shared expert's MLP."""
        module = f"{self.names.module}.{self.names.shared}"
        return GatedMlp(module, "shared_", self.experts.shared, in_vllm=False)

    def forward(self, w: LayerWeights, rows: Rows, layer: LayerRun) -> Rows:
        """The router's logits are in numerics.router, or in fp32, and the routing weights in fp32."""
        x, in_pass = rows.x, rows.context.in_pass
        dtype = self._logits_dtype(layer.numerics, x.dtype) or x.dtype
        logits = _router_logits(x, w["router"], w.get(LOGITS_BIAS), in_pass, layer.numerics.tiles, dtype)
        layer.show("router", logits)
        q, ids = self._route(logits, w, layer.i, rows.context.routing)
        y = self._mixture(x, q, ids, w, layer.numerics.shared_experts, in_pass)
        layer.show("experts", y)
        return Rows(self._with_shared(y, w, rows, layer), rows.residual, rows.context)

    def _mixture(
        self,
        x: torch.Tensor,
        q: torch.Tensor,
        ids: torch.Tensor,
        w: LayerWeights,
        shared: SharedExperts,
        in_pass: Pass,
    ) -> torch.Tensor:
        """The weighted sum of the experts ids [T, k] of each row of x [T, D], by all ranks. -> [T, D]"""
        if shared.size == 1:
            return self._weighted(x, q, w, expert_rows(ids, self.experts.number, x), in_pass)
        in_pass = in_pass.over(x)

        def weighted(x: torch.Tensor, q: torch.Tensor, rows: ExpertRowsOf) -> torch.Tensor:
            return self._weighted(x, q, w, rows, in_pass)

        return shared.mixture(x, q, ids, self.experts.number, weighted)

    def _weighted(
        self, x: torch.Tensor, q: torch.Tensor, w: LayerWeights, rows: ExpertRowsOf, in_pass: Pass
    ) -> torch.Tensor:
        """The weighted sum of the experts of each row of x [T, D]; q [T, k]. -> [T, D]"""
        h = silu_mul(grouped_linear(x, w["experts.gate_up"], rows, in_pass))
        return combine_experts(h, w["experts.down"], q, rows, in_pass)

    def _route(
        self, logits: torch.Tensor, w: LayerWeights, i: int, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The routing weights and the experts of each row of logits [T, E], [T, k] each."""
        c = self.experts
        if c.sigmoid:
            return self._route_by_sigmoid(logits, w, i, routing)
        if c.softmax:
            ids = routing.experts(i, logits, topk_of_groups(logits, *self.choice))
            return given_softmax(logits, ids, c.renormalise) * c.softmax.scale, ids
        q, ids = topk_softmax(logits, c.per_token, c.renormalise)
        given = routing.experts(i, logits, ids)
        return (q, ids) if given is ids else (given_softmax(logits, given, c.renormalise), given)

    def _route_by_sigmoid(
        self, logits: torch.Tensor, w: LayerWeights, i: int, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As _route."""
        ids = sigmoid_choice(logits, as_numbers(w["router_bias"]), self.choice)
        ids = routing.experts(i, logits, ids)
        how = Weighing(self.experts.renormalise, self.experts.sigmoid.scale)
        return sigmoid_weights(logits, ids, how), ids

    @property
    def choice(self) -> Choice:
        """How many experts and groups one of DeepSeek's routers chooses."""
        grouped = self.experts.grouped
        return Choice(self.experts.per_token, grouped.groups, grouped.top_groups)

    def _with_shared(self, y: torch.Tensor, w: LayerWeights, rows: Rows, layer: LayerRun) -> torch.Tensor:
        """y [T, D] of the chosen experts, and the shared expert's output added to it."""
        if not self.experts.shared:
            return y
        shared = self._shared.forward(w, rows, layer).x
        if self.experts.shared_gate:
            z = linear(rows.x, w["shared_gate"], None, rows.context.in_pass, layer.numerics.tiles)
            layer.show("shared_gate", z)
            y = add_shared(y, shared, z)
        else:
            y = y + shared
        layer.show("mixture", y)
        return y


def _router_logits(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    in_pass: Pass,
    tiles: TileTable,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x [T, D], w [E, D], b [E] or None -> logits [T, E] in `dtype`.

    The gradient of a converted weight has the buffer of the weight.
    """
    if dtype == w.dtype:  # a source of weights may have it in this dtype
        return linear(x.to(dtype), w, b, in_pass, tiles)
    wide, buffers = [], {}
    for p in (w,) if b is None else (w, b):
        buffer = in_pass.buffers.get(p)
        wide.append(p.to(dtype) if buffer is None else p.detach().to(dtype).requires_grad_())
        buffers |= {} if buffer is None else {wide[-1]: buffer}
    in_pass = replace(in_pass, buffers=buffers) if buffers else in_pass
    return linear(x.to(dtype), *wide, in_pass=in_pass, tiles=tiles)
