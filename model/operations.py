"""The table of a decoder's operations: name, work, memory, where engines show it, what an audit says.

Everything that is known of an operation stands in its row of OPERATIONS, in the order of computation. A trace
calls an operation of layer i "layers.i.NAME" and any other one NAME. Importing this module loads no torch.

Shapes: T tokens of packed sequences. An output is [T, width], that of `logprob` [C, 1] for C drawn tokens.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .operation import Equation, Operation, Shown, Site, Size, Work

if TYPE_CHECKING:
    import torch

    from ..verify.operation_outputs import Trace
    from .config import ModelConfig

# Read by an operation: the residual stream before its layer, or after the last one.
STREAM = "stream"


def _hidden(c: "ModelConfig") -> int:
    return c.hidden_size


def _queries(c: "ModelConfig") -> int:
    return c.heads * c.head_dim


def _keys(c: "ModelConfig") -> int:
    return c.kv_heads * c.head_dim


def _inner(c: "ModelConfig") -> int:
    return c.intermediate_size


def _vocabulary(c: "ModelConfig") -> int:
    return c.vocab_size


def _product(inputs: Size, outputs: Size) -> Callable[["ModelConfig", Work], int]:
    """The floating-point operations of a matrix product, of every token."""
    return lambda c, work: 2 * inputs(c) * outputs(c) * work.tokens


_NORM_REMEDY = "Compare the norm's weight and its epsilon with the checkpoint's."
_ROPE_REMEDY = "Compare rope_theta, rope_scaling and the positions that both engines use."
_WEIGHT_REMEDY = (
    "Compare this weight in the engine's memory with the checkpoint's: a sync, a merge of an adapter, a "
    "quantisation or a sharding changed it."
)
_SUM_REMEDY = "Compare how the engine adds to the residual stream, and in which dtype."

OPERATIONS = (
    Operation(
        name="embed",
        in_layer=False,
        equation=Equation.EMBEDDING,
        reads=(),
        width=_hidden,
        transformers=Site("model.embed_tokens"),
        vllm=Site("model.embed_tokens"),
        remedy="Compare the embedding in the engine's memory with the checkpoint's.",
    ),
    Operation(
        name="input_norm",
        equation=Equation.NORM,
        reads=(STREAM,),
        width=_hidden,
        kept=_hidden,
        kept_fp32=lambda c: 1,
        transformers=Site("input_layernorm"),
        vllm=Site("input_layernorm"),
        remedy=_NORM_REMEDY,
    ),
    Operation(
        name="q_proj",
        equation=Equation.LINEAR,
        fused="qkv",
        reads=("input_norm",),
        width=_queries,
        flops=_product(_hidden, _queries),
        kept=_queries,
        transformers=Site("self_attn.q_proj"),
        vllm=Site("self_attn.qkv_proj"),
        remedy=_WEIGHT_REMEDY,
    ),
    Operation(
        name="k_proj",
        equation=Equation.LINEAR,
        fused="qkv",
        reads=("input_norm",),
        width=_keys,
        flops=_product(_hidden, _keys),
        kept=_keys,
        transformers=Site("self_attn.k_proj"),
        vllm=Site("self_attn.qkv_proj"),
        remedy=_WEIGHT_REMEDY,
    ),
    Operation(
        name="v_proj",
        equation=Equation.LINEAR,
        fused="qkv",
        reads=("input_norm",),
        width=_keys,
        flops=_product(_hidden, _keys),
        kept=_keys,
        transformers=Site("self_attn.v_proj"),
        vllm=Site("self_attn.qkv_proj"),
        remedy=_WEIGHT_REMEDY,
    ),
    Operation(
        name="q_norm",
        equation=Equation.NORM,
        only_with="qk_norm",
        fused="qk_norm",
        reads=("q_proj",),
        width=_queries,
        kept_fp32=lambda c: c.heads,
        transformers=Site("self_attn.q_norm"),
        vllm=Site("self_attn.q_norm"),
        remedy=_NORM_REMEDY,
    ),
    Operation(
        name="k_norm",
        equation=Equation.NORM,
        only_with="qk_norm",
        fused="qk_norm",
        reads=("k_proj",),
        width=_keys,
        kept_fp32=lambda c: c.kv_heads,
        transformers=Site("self_attn.k_norm"),
        vllm=Site("self_attn.k_norm"),
        remedy=_NORM_REMEDY,
    ),
    Operation(
        name="q_rope",
        equation=Equation.ROPE,
        fused="rope",
        reads=("q_norm",),
        width=_queries,
        kept=_queries,
        transformers=Site("self_attn", Shown.QUERY),
        vllm=Site("self_attn.rotary_emb"),
        remedy=_ROPE_REMEDY,
    ),
    Operation(
        name="k_rope",
        equation=Equation.ROPE,
        fused="rope",
        reads=("k_norm",),
        width=_keys,
        kept=_keys,
        transformers=Site("self_attn", Shown.KEY),
        vllm=Site("self_attn.rotary_emb", element=1),
        remedy=_ROPE_REMEDY,
    ),
    Operation(
        name="attention",
        equation=Equation.ATTENTION,
        reads=("q_rope", "k_rope", "v_proj"),
        width=_queries,
        flops=lambda c, work: 4 * _queries(c) * work.pairs,  # the scores, and the sum of the values
        # Its output, and the keys and values in the order of attention, twice; the log-sum-exp of each head.
        kept=lambda c: _queries(c) + 4 * _keys(c),
        kept_fp32=lambda c: c.heads,
        transformers=Site("self_attn.o_proj", Shown.INPUT),
        vllm=Site("self_attn.attn"),
        remedy="Compare the mask, the scale, the dtype of the cache and the attention backend.",
    ),
    Operation(
        name="o_proj",
        equation=Equation.LINEAR,
        reads=("attention",),
        width=_hidden,
        flops=_product(_queries, _hidden),
        transformers=Site("self_attn.o_proj"),
        vllm=Site("self_attn.o_proj"),
        remedy=_WEIGHT_REMEDY,
    ),
    Operation(
        name="attention_residual",
        equation=Equation.SUM,
        reads=(STREAM, "o_proj"),
        width=_hidden,
        kept=_hidden,
        transformers=Site("post_attention_layernorm", Shown.INPUT),
        vllm=Site("post_attention_layernorm", element=1),
        remedy=_SUM_REMEDY,
    ),
    Operation(
        name="post_norm",
        equation=Equation.NORM,
        reads=("attention_residual",),
        width=_hidden,
        kept=_hidden,
        kept_fp32=lambda c: 1,
        transformers=Site("post_attention_layernorm"),
        vllm=Site("post_attention_layernorm"),
        remedy=_NORM_REMEDY,
    ),
    Operation(
        name="gate_proj",
        sparse=False,
        equation=Equation.LINEAR,
        fused="gate_up",
        reads=("post_norm",),
        width=_inner,
        flops=_product(_hidden, _inner),
        kept=_inner,
        transformers=Site("mlp.gate_proj"),
        vllm=Site("mlp.gate_up_proj"),
        remedy=_WEIGHT_REMEDY,
    ),
    Operation(
        name="up_proj",
        sparse=False,
        equation=Equation.LINEAR,
        fused="gate_up",
        reads=("post_norm",),
        width=_inner,
        flops=_product(_hidden, _inner),
        kept=_inner,
        transformers=Site("mlp.up_proj"),
        vllm=Site("mlp.gate_up_proj"),
        remedy=_WEIGHT_REMEDY,
    ),
    Operation(
        name="silu_mul",
        sparse=False,
        equation=Equation.SILU_MUL,
        reads=("gate_proj", "up_proj"),
        width=_inner,
        kept=_inner,
        transformers=Site("mlp.down_proj", Shown.INPUT),
        vllm=Site("mlp.act_fn"),
        remedy="Compare hidden_act, and the dtype of the activation (fused kernels may keep fewer bits).",
    ),
    Operation(
        name="down_proj",
        sparse=False,
        instead="experts",
        equation=Equation.LINEAR,
        reads=("silu_mul",),
        width=_hidden,
        flops=_product(_inner, _hidden),
        transformers=Site("mlp.down_proj"),
        vllm=Site("mlp.down_proj"),
        remedy=_WEIGHT_REMEDY,
    ),
    Operation(
        name="router",
        sparse=True,
        equation=Equation.LINEAR,
        reads=("post_norm",),
        width=lambda c: c.experts.number,
        flops=lambda c, work: 2 * c.hidden_size * c.experts.number * work.tokens,
        kept_fp32=lambda c: c.experts.number,
        transformers=Site("mlp.gate"),
        vllm=Site("mlp.gate"),
        remedy="Compare the router's weight in the engine's memory with the checkpoint's, and its dtype.",
    ),
    Operation(
        name="experts",
        sparse=True,
        equation=Equation.EXPERTS,
        reads=("post_norm", "router"),
        width=_hidden,
        flops=lambda c, work: 6 * c.hidden_size * c.experts.size * c.experts.per_token * work.tokens,
        # Gate, up and their product for each expert of a token; ids, routing weights and tables of the rows.
        # On a GPU these take 5 numbers of 4 bytes for each expert.
        kept=lambda c: 3 * c.experts.size * c.experts.per_token,
        kept_fp32=lambda c: 9 * c.experts.per_token,
        transformers=Site("mlp.experts"),
        vllm=Site("mlp.experts"),
        remedy="Compare the chosen experts, the rounding of the routing weights, and the order of the sum.",
    ),
    Operation(
        name="mlp_residual",
        equation=Equation.SUM,
        reads=("attention_residual", "down_proj"),
        width=_hidden,
        kept=_hidden,
        transformers=Site(""),
        vllm=Site("input_layernorm", element=1, after_last="model.norm"),  # which adds before it norms
        remedy=_SUM_REMEDY,
    ),
    Operation(
        name="norm",
        in_layer=False,
        equation=Equation.NORM,
        reads=(STREAM,),
        width=_hidden,
        transformers=Site("model.norm"),
        vllm=Site("model.norm"),
        remedy=_NORM_REMEDY,
    ),
    Operation(
        name="logits",
        in_layer=False,
        equation=Equation.LINEAR,
        reads=("norm",),
        width=_vocabulary,
        flops=lambda c, work: 2 * c.hidden_size * c.vocab_size * work.drawn,
        transformers=Site("lm_head"),
        vllm=Site("logits_processor"),
        remedy="Compare lm_head, the tying of the embeddings, and the dtype of the logits.",
    ),
    Operation(
        name="logprob",
        in_layer=False,
        equation=Equation.LOGPROB,
        reads=("logits",),
        width=lambda c: 1,
        transformers=None,  # the engines of an audit compute it from the logits
        vllm=None,
        remedy="Compare temperature, top-k, top-p and the kind of log-probability that the engine reports.",
    ),
)


def split_name(name: str) -> tuple[str, str]:
    """The name of an operation in a trace, as the prefix of its layer ("" in no layer) and the rest."""
    layer, _, rest = name.rpartition(".")
    return f"{layer}." if layer else "", rest


def operation(name: str) -> Operation:
    """The row of an operation, by its name in a trace. Raises KeyError for an unknown one."""
    rest = split_name(name)[1]
    for row in OPERATIONS:
        if row.name == rest:
            return row
    raise KeyError(f"{name} is in no row of model/operations.py")


def _numbered(layers: int) -> Iterator[tuple[str, int | None, Operation]]:
    """Every operation of a decoder, in the order of computation: its name in a trace, and its layer."""
    first = next(i for i, row in enumerate(OPERATIONS) if row.in_layer)
    for row in OPERATIONS[:first]:
        yield row.name, None, row
    for i in range(layers):
        for row in OPERATIONS:
            if row.in_layer:
                yield f"layers.{i}.{row.name}", i, row
    for row in OPERATIONS[first:]:
        if not row.in_layer:
            yield row.name, None, row


def operation_names(layers: int, experts: bool = False) -> list[str]:
    """The names of all operations of a decoder in a trace, in the order of computation.

    experts: with those that only layers with experts have.
    """
    return [name for name, _, row in _numbered(layers) if experts or not row.sparse]


def in_order(trace: "Trace", layers: int) -> "Trace":
    """`trace` in the order of computation, without the operations that it does not hold."""
    return {name: trace[name] for name in operation_names(layers, experts=True) if name in trace}


def input_names(name: str, config: "ModelConfig") -> tuple[str, ...]:
    """The names in a trace of what an operation reads. An operation that the model lacks is passed over."""
    prefix, _ = split_name(name)
    layer = int(prefix.split(".")[1]) if prefix else config.layers
    stream = f"layers.{layer - 1}.mlp_residual" if layer else "embed"
    read = []
    for source in operation(name).reads:
        while source != STREAM and not (row := operation(source)).is_in(config, layer if prefix else None):
            (source,) = [row.instead] if row.instead else row.reads
        read.append(stream if source == STREAM else prefix + source)
    return tuple(read)


def sites(engine: str, layers: int) -> Iterator[tuple[str, Operation, Site]]:
    """Every operation that a model of `engine` shows: its name in a trace, its row, and where.

    engine: "transformers" or "vllm". The modules of the sites are named from the model.
    """
    for name, layer, row in _numbered(layers):
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


def rows_of(fused: str) -> list[Operation]:
    """The operations that our decoder computes as one, under the name `fused`."""
    return [row for row in OPERATIONS if row.fused == fused]


def split_fused(name: str, x: "torch.Tensor", config: "ModelConfig") -> "dict[str, torch.Tensor]":
    """Split an output of our decoder into those of the operations, [T, width], by their names in a trace.

    The decoder computes some operations as one, under the name `fused`. The results are views of x [T, ...].
    """
    prefix, rest = split_name(name)
    rows = rows_of(rest) or [operation(name)]
    parts = x.reshape(x.shape[0], -1).split([row.width(config) for row in rows], dim=1)
    return {prefix + row.name: part for row, part in zip(rows, parts, strict=True)}


def forward_flops(config: "ModelConfig", work: Work) -> int:
    """The floating-point operations of a forward."""
    return sum(
        row.flops(config, work) for _, layer, row in _numbered(config.layers) if row.is_in(config, layer)
    )


def layer_bytes_per_token(config: "ModelConfig", itemsize: int) -> int:
    """What the operations of one layer keep of a row for their backward. itemsize: of the compute dtype.

    With experts in some layers only, it is of the layer that keeps most.
    """

    def kept(layer: int) -> int:
        rows = [row for row in OPERATIONS if row.in_layer and row.is_in(config, layer)]
        return sum(row.kept(config) * itemsize + 4 * row.kept_fp32(config) for row in rows)

    return max(map(kept, range(config.layers)))
