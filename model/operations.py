"""The table of a decoder's operations: name, work, memory, where engines show it, what an audit says.

The rows are those of the decoder's blocks (blocks/), in the order of computation. A trace calls an operation
of layer i "layers.i.NAME" and any other one NAME.

An audit also shows models that no family has. For these there are the known operations: those of all blocks.

Shapes: T tokens of packed sequences. An output is [T, width], that of `logprob` [C, 1] for C drawn tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch

from ..kernels.recurrent_state import StateShape
from ..verify.operation_outputs import Trace
from .blocks.attention import Attention
from .blocks.delta_net import DeltaNet
from .blocks.embedding import Embedding, Head
from .blocks.experts import MixtureOfExperts
from .blocks.gated_attention import GatedAttention
from .blocks.latent_attention import LatentAttention
from .blocks.mlp import GatedMlp
from .blocks.residual import Layer, layer_operations, post_norm, pre_norm
from .config import ModelConfig
from .operation import STREAM, Operation, Site, Work
from .sizes import Experts, Sizes

# Layers that have all blocks, with all variants that have operations of their own, and without them.
KINDS_OF_LAYERS = (
    pre_norm(Attention(qk_norm=True), GatedMlp()),
    pre_norm(Attention(), MixtureOfExperts(Experts(1, 1, 1, False, frozenset()))),
    pre_norm(Attention(), MixtureOfExperts(Experts(1, 1, 1, False, frozenset(), 1, True))),
)
# Kinds that some families have instead. Their modules have the names of other operations' modules, so an
# engine's model shows them only where it is of such a family.
OTHER_KINDS = (
    post_norm(Attention(wide_qk_norm=True), GatedMlp(activation="gelu_tanh")),
    pre_norm(GatedAttention(), GatedMlp()),
    pre_norm(LatentAttention(1, 1, 1.0, q_rank=1), GatedMlp()),
    pre_norm(DeltaNet(StateShape(1, 1, 1, 1)), GatedMlp()),
    pre_norm(DeltaNet(StateShape(1, 1, 1, 1), fused_names=True), GatedMlp()),
)
# Where the sizes of a model are not known, or do not matter.
ANY_SIZES = Sizes("", 1, 1, 1, 1, 1, 1, 16, 1, 0.0, 1.0, None, 16, False, False, {})


def split_name(name: str) -> tuple[str, str]:
    """The name of an operation in a trace, as the prefix of its layer ("" in no layer) and the rest."""
    layer, _, rest = name.rpartition(".")
    return f"{layer}." if layer else "", rest


def layer_of(name: str) -> int:
    """The layer of an operation, by its name in a trace. Raises IndexError for one that is in no layer."""
    return int(split_name(name)[0].split(".")[1])


def _numbered(
    before: Sequence[Operation], layers: Sequence[Sequence[Operation]], after: Sequence[Operation]
) -> Iterator[tuple[str, int | None, Operation]]:
    """The operations of a decoder, in the order of computation: name in a trace, layer, and row."""
    yield from ((row.name, None, row) for row in before)
    for i, rows in enumerate(layers):
        yield from ((f"layers.{i}.{row.name}", i, row) for row in rows)
    yield from ((row.name, None, row) for row in after)


# Of a model with a config


def operations(config: ModelConfig) -> Iterator[tuple[str, int | None, Operation]]:
    """All operations of a model, in the order of computation: name in a trace, layer, and row."""
    before, after = config.outside_operations
    return _numbered(before, config.layer_operations, after)


def operation_names(config: ModelConfig) -> list[str]:
    """The names of all operations of a model in a trace, in the order of computation."""
    return [name for name, _, _ in operations(config)]


def operation(name: str, config: ModelConfig) -> Operation:
    """The row of an operation, by its name in a trace. Raises KeyError for one that the model lacks."""
    for row in _neighbours(name, config):
        if row.name == split_name(name)[1]:
            return row
    raise KeyError(f"{name} is no operation of this {config.architecture}")


def _neighbours(name: str, config: ModelConfig) -> Sequence[Operation]:
    """The operations of the same layer; or those of no layer."""
    if split_name(name)[0]:
        i = layer_of(name)
        return config.layer_operations[i] if i < config.layers else ()
    return [row for rows in config.outside_operations for row in rows]


def input_names(name: str, config: ModelConfig) -> tuple[str, ...]:
    """The names in a trace of what an operation reads."""
    prefix, _ = split_name(name)
    stream = config.stream(int(prefix.split(".")[1]) if prefix else config.layers)
    return tuple(stream if x == STREAM else prefix + x for x in operation(name, config).reads)


def fused_with(name: str, config: ModelConfig) -> list[Operation]:
    """The operations that our decoder computes as one, by the name in a trace of that or of one of them."""
    rest, rows = split_name(name)[1], _neighbours(name, config)
    fused = next((row.fused for row in rows if row.name == rest), rest)
    return [row for row in rows if fused and row.fused == fused] or [operation(name, config)]


def split_fused(name: str, x: torch.Tensor, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Split an output of our decoder into those of the operations, [T, width], by their names in a trace.

    The decoder computes some operations as one (Operation.fused). The results are views of x [T, ...].
    """
    prefix, rows = split_name(name)[0], fused_with(name, config)
    parts = x.reshape(x.shape[0], -1).split([row.width for row in rows], dim=1)
    return {prefix + row.name: part for row, part in zip(rows, parts, strict=True)}


def forward_flops(config: ModelConfig, work: Work) -> int:
    """The floating-point operations of a forward."""
    return sum(n * each for _, _, row in operations(config) for n, each in zip(work, row.flops, strict=True))


def layer_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """What the operations of one layer keep of a row for their backward. itemsize: of the compute dtype.

    Where layers differ, it is of the layer that keeps most.
    """
    kept = (sum(r.kept * itemsize + 4 * r.kept_fp32 for r in rows) for rows in config.layer_operations)
    return max(kept)


# Of any model


def known_rows(
    c: Sizes = ANY_SIZES, kinds: Sequence[Layer] = KINDS_OF_LAYERS + OTHER_KINDS
) -> list[Operation]:
    """The operations of all blocks, in an order in which layers of the first kinds compute them."""
    rows: list[Operation] = []
    for kind in kinds:
        place = 0
        for row in layer_operations(kind, c):
            names = [other.name for other in rows]
            if row.name not in names:
                rows.insert(place, row)
            place = names.index(row.name) + 1 if row.name in names else place + 1
    return rows


@cache
def _in_all_decoders() -> frozenset[str]:
    """The operations that no decoder lacks."""
    in_all = set.intersection(
        *({other.name for other in layer_operations(kind, ANY_SIZES)} for kind in KINDS_OF_LAYERS)
    )
    outside = {other.name for block in (Embedding(), Head()) for other in block.operations(ANY_SIZES)}
    return frozenset(in_all | outside)


def is_optional(row: Operation) -> bool:
    """Whether there are decoders without this operation."""
    return row.name not in _in_all_decoders()


def known(layers: int, c: Sizes = ANY_SIZES) -> Iterator[tuple[str, int | None, Operation]]:
    """The known operations of a decoder: name in a trace, layer, and row. c: the sizes of the rows."""
    return _numbered(Embedding().operations(c), [known_rows(c)] * layers, Head().operations(c))


@cache
def _known_by_name() -> Mapping[str, Operation]:
    return {row.name: row for _, _, row in known(1)}


def known_operation(name: str) -> Operation:
    """A known operation, by its name in a trace. Its sizes are no model's. Raises KeyError."""
    return _known_by_name()[split_name(name)[1]]


def in_order(trace: Trace, layers: int, config: ModelConfig | None = None) -> Trace:
    """`trace` in the order of computation. config: of the model, where it is known."""
    names = [name for name, _, _ in known(layers)]
    if config is not None and trace.keys() <= {*operation_names(config)}:
        names = operation_names(config)
    return {name: trace[name] for name in names if name in trace}


def sites(engine: str, layers: int, c: Sizes = ANY_SIZES) -> Iterator[tuple[str, Operation, Site]]:
    """Every operation that a model of `engine` may show: its name in a trace, its row, and where.

    engine: "transformers" or "vllm". The modules of the sites are named from the model. c: as for `known`; a
    whole ModelConfig knows its operations, and the model may show others beside them.
    """
    shown = list(
        _numbered(Embedding().operations(c), [known_rows(c, KINDS_OF_LAYERS)] * layers, Head().operations(c))
    )
    if isinstance(c, ModelConfig):
        rows = list(operations(c))
        taken = {name for name, _, _ in rows} | {(i, getattr(row, engine)) for _, i, row in rows}
        shown = rows + [
            (name, i, row)
            for name, i, row in shown
            if is_optional(row) and not {name, (i, getattr(row, engine))} & taken
        ]
    for name, layer, row in shown:
        site: Site | None = getattr(row, engine)
        if site is None:
            continue
        module, place = site.module, layer
        if site.after_last and place is not None:
            place += 1
            if place == layers:
                module, place = site.after_last, None
        if place is not None:
            module = f"model.layers.{place}.{module}".rstrip(".")
        yield name, row, site._replace(module=module, after_last="")
