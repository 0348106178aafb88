"""Causal attention, with rotary embedding.

    q, k, v = x w^T (+ bias);   q, k = rope(norm of each head, where the model has it);
    y = attention(q, k, v) o^T (+ bias), of a window of keys where the layer has one

As in vLLM, q, k and v are one matrix. Shapes: T tokens of packed sequences, D hidden size (of a head, in
[T, heads, D]), Hq query heads, Hkv key-value heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from pydantic import PositiveInt

from ...kernels.attention_rule import AttentionRule
from ...kernels.attention_sinks import sink_rows
from ...kernels.decode_heads import QKNormWeights, heads_to_cache
from ...kernels.linear import linear
from ...kernels.qk_norm import qk_norm
from ...kernels.rms_norm import rms_norm
from ...kernels.rope import rope
from ..cache import DecodeContext
from ..config_file import ConfigFile, Fields
from ..context import Context, KeepingContext, no_hook
from ..kv_rounding import rounded_kv
from ..operation import Equation, Operation, Shown, Site, Work, norm_row, projection_row
from ..sizes import Sizes
from .block import LayerRun, LayerWeights, Mixer, Rows, Weight

# Of a family whose layers `read_windows` reads.
WINDOW_TYPES = frozenset({"full_attention", "sliding_attention"})


class _WindowFields(Fields):
    sliding_window: PositiveInt | None = None
    layer_types: list[str] | None = None


def read_windows(config: ConfigFile, period: int) -> list[int]:
    """The window of each layer, in keys; 0 where a row sees all keys.

    period: where config.json lacks layer_types, every `period`-th layer sees all. Raises UnsupportedError.
    """
    n, file = config.fields.num_hidden_layers, config.read(_WindowFields)
    usual = ["full_attention" if not (i + 1) % period else "sliding_attention" for i in range(n)]
    types = usual if file.layer_types is None else file.layer_types
    if len(types) != n:
        config.refuse("layer_types", types, f"num_hidden_layers is {n}")
    window = config.value("sliding_window")
    if window is None and "sliding_attention" in types:
        config.wrong("sliding_window is null, and layers are of sliding_attention; give its width in tokens")
    return [window if x == "sliding_attention" else 0 for x in types]


def refuse_bidirectional(config: ConfigFile) -> None:
    """Refuse attention without a causal mask."""
    if config.value("use_bidirectional_attention"):
        config.refuse("use_bidirectional_attention", True, "only causal attention is")


@dataclass(frozen=True)
class Attention(Mixer):
    """Causal attention of heads, with its projections."""

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each query head and key head
    norms_heads_first: bool | None = None  # whether transformers norms rows of heads before tokens
    wide_qk_norm: bool | None = None  # RMSNorm of all queries of a token, and of all its keys
    no_rope: bool | None = None  # no rotary embedding
    scale: float | None = None  # of the scores; None is 1 / sqrt(D of a head)
    fused_names: bool | None = None  # a checkpoint has q, k and v as one tensor
    window: int | None = None  # the last keys that a row sees, its own among them; 0 and None are all
    cap: float | None = None  # a score s becomes cap tanh(s / cap)
    # Of a plain rotary embedding in place of the model's.
    local_rope_theta: float | None = None
    sinks: bool | None = None  # every row has one logit more, of its head (kernels/attention_sinks.py)
    gated: bool | None = None  # its output is multiplied by a gate (gated_attention.py)

    @property
    def has_leaves(self) -> bool:
        return not (self.wide_qk_norm or self.gated)

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """qkv [(Hq + 2 Hkv) D, hidden], o [hidden, Hq D], their biases, and the heads' norms [D]."""
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        qkv = (("q", q), ("k", kv), ("v", kv))
        if self.fused_names:
            parts = (("self_attn.qkv_proj.weight", q + 2 * kv),)
        else:
            parts = tuple((f"self_attn.{p}_proj.weight", n) for p, n in qkv)
        yield Weight("qkv", (c.hidden_size,), parts, shared_rows=(q, kv, kv))
        if self.qkv_bias:
            biases = tuple((f"self_attn.{p}_proj.bias", n) for p, n in qkv)
            yield Weight("qkv_bias", (), biases, shared_rows=(q, kv, kv))
        if self.qk_norm or self.wide_qk_norm:
            for p, width in (("q", q), ("k", kv)):
                rows = width if self.wide_qk_norm else c.head_dim
                yield Weight(f"{p}_norm", (), ((f"self_attn.{p}_norm.weight", rows),))
        yield Weight("o", (q,), (("self_attn.o_proj.weight", c.hidden_size),), shared_columns=True)
        if self.o_bias:
            yield Weight("o_bias", (), (("self_attn.o_proj.bias", c.hidden_size),))
        if self.sinks:
            yield Weight("sinks", (), (("self_attn.sinks", c.heads),))

    def operations(self, c: Sizes, x: str) -> tuple[Operation, ...]:
        D, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
        vllm = "self_attn.qkv_proj"
        projected = [
            projection_row(
                f"{p}_proj",
                x,
                D,
                width,
                vllm if self.fused_names else f"self_attn.{p}_proj",
                vllm,
                fused="qkv",
                kept=width,
            )
            for p, width in (("q", q), ("k", kv), ("v", kv))
        ]
        norms = [
            norm_row(f"{p}_norm", f"{p}_proj", width, f"self_attn.{p}_norm", kept_fp32=heads, fused="qk_norm")
            for p, width, heads in (("q", q, c.heads), ("k", kv, c.kv_heads))
            if self.qk_norm or self.wide_qk_norm
        ]
        if self.norms_heads_first:
            norms = [replace(row, transformers=row.transformers._replace(heads_first=True)) for row in norms]
        last = "norm" if norms else "proj"
        rotated = [
            Operation(
                name=f"{p}_rope",
                equation=Equation.ROPE,
                fused="rope",
                reads=(f"{p}_{last}",),
                width=width,
                kept=width,
                transformers=Site("self_attn", kind),
                vllm=Site("self_attn.rotary_emb", element=element),
                remedy="Compare rope_theta, rope_scaling and the positions that both engines use.",
            )
            for p, width, kind, element in (("q", q, Shown.QUERY, 0), ("k", kv, Shown.KEY, 1))
            if not self.no_rope
        ]
        last = "rope" if rotated else last
        attended = Operation(
            name="attention",
            equation=Equation.ATTENTION,
            reads=(f"q_{last}", f"k_{last}", "v_proj"),
            width=q,
            factor=self._scale(c),
            window=self.window or 0,
            cap=self.cap or 0.0,
            sinks=bool(self.sinks),
            flops=Work(pairs=4 * q),  # the scores, and the sum of the values
            # Its output, and the keys and values in the order of attention, twice; log-sum-exps of the heads.
            kept=q + 4 * kv,
            kept_fp32=c.heads,
            transformers=Site("self_attn.o_proj", Shown.INPUT),
            vllm=Site("self_attn.attn"),
            remedy="Compare the mask, the scale, the dtype of the cache and the attention backend.",
        )
        output = projection_row("o_proj", "attention", q, D, "self_attn.o_proj")
        return (*projected, *norms, *rotated, attended, output)

    def forward(self, w: LayerWeights, rows: Rows, layer: LayerRun) -> Rows:
        o = self._attended(w, rows.x, layer, rows.context)
        layer.show("attention", o)
        if layer.is_last:
            rows = rows.narrowed(o)
        in_pass, (tiles, leaves) = rows.context.in_pass, layer.order
        o = o.flatten(1)
        x = linear(o, w["o"], w.get("o_bias"), in_pass, tiles, leaves.inputs(o.shape[1]))
        layer.show("o_proj", x)
        return Rows(x, rows.residual, rows.context)

    def keep(self, w: LayerWeights, x: torch.Tensor, layer: LayerRun, context: KeepingContext) -> None:
        context.keep(*self._qkv(w, x, layer, context)[1:])

    def _attended(self, w: LayerWeights, x: torch.Tensor, layer: LayerRun, context: Context) -> torch.Tensor:
        """Attention without its output projection. x [T, D] -> [T, Hq, D of a head]."""
        c, numerics, scale = layer.config, layer.numerics, self._scale(layer.config)
        rule = self._rule(numerics.attention)
        in_cache = isinstance(context, DecodeContext) and layer.hook is no_hook
        other_norm = self.wide_qk_norm or (self.qk_norm and c.norm_plus_one)
        plain = not (other_norm or self.no_rope) and c.rotary_dim == c.head_dim
        sinks = sink_rows(w["sinks"], len(x), context.in_pass) if self.sinks else None
        if not in_cache or not plain or not numerics.cache_rounds_once(x.dtype):
            return context.attend(layer.i, *self._qkv(w, x, layer, context), scale, rule, sinks)
        # As `_qkv`, with the keys and values in the cache by the same kernel.
        qkv = self._heads(w, x, layer, context)
        norm = QKNormWeights(w["q_norm"], w["k_norm"], c.eps) if self.qk_norm else None
        q = heads_to_cache(qkv, norm, *layer.rotation, c.heads, context.slots(layer.i))
        return context.attend_cached(layer.i, q, scale, rule, sinks)

    def _rule(self, order: AttentionRule) -> AttentionRule:
        """What the layer's rows see, with the order of their sums."""
        if not self.window and not self.cap:
            return order
        return order._replace(window=self.window or 0, cap=self.cap or 0.0)

    def _scale(self, c: Sizes) -> float:
        """What the scores are multiplied by."""
        return c.head_dim**-0.5 if self.scale is None else self.scale

    def _qkv(
        self, w: LayerWeights, x: torch.Tensor, layer: LayerRun, context: Context
    ) -> tuple[torch.Tensor, ...]:
        """q [T, Hq, D], k and v [T, Hkv, D], as attention reads them."""
        c, qkv = layer.config, self._heads(w, x, layer, context)
        layer.show("qkv", qkv)
        qk, v = qkv.split([c.heads + c.kv_heads, c.kv_heads], dim=1)
        if self.qk_norm:
            norms = w["q_norm"], w["k_norm"], c.heads, c.eps, context.in_pass, c.norm_plus_one
            qk = qk_norm(qk, *norms, layer.numerics.leaves)
            layer.show("qk_norm", qk)
        if self.wide_qk_norm:
            qk = self._wide_norm(w, qk, layer, context)
        if not self.no_rope:
            qk = rope(qk, *layer.rotation)
            layer.show("rope", qk)
        q, k = qk.split([c.heads, c.kv_heads], dim=1)
        return q, rounded_kv(k, layer.numerics), rounded_kv(v, layer.numerics)

    def _wide_norm(
        self, w: LayerWeights, qk: torch.Tensor, layer: LayerRun, context: Context
    ) -> torch.Tensor:
        """Of the queries and of the keys of each token, [T, Hq + Hkv, D] -> the same."""
        c, parts = layer.config, qk.split([layer.config.heads, layer.config.kv_heads], dim=1)
        normed = [
            rms_norm(part.flatten(1), w[name], c.eps, context.in_pass)
            for part, name in zip(parts, ("q_norm", "k_norm"), strict=True)
        ]
        both = torch.cat(normed, dim=1).view(qk.shape)
        layer.show("qk_norm", both)
        return both

    def _heads(self, w: LayerWeights, x: torch.Tensor, layer: LayerRun, context: Context) -> torch.Tensor:
        """x [T, D] -> [T, Hq + 2 Hkv, D of a head]."""
        c, (tiles, leaves) = layer.config, layer.order
        cut = leaves.outputs(c.heads * c.head_dim, *[c.kv_heads * c.head_dim] * 2)
        qkv = linear(x, w["qkv"], w.get("qkv_bias"), context.in_pass, tiles, cut)
        return qkv.view(x.shape[0], -1, c.head_dim)
