"""The operations of a decoder, each alone, in any dtype, with plain torch.

They are the yardstick of an audit. In fp64 an operation is exact beside an engine's. In the engine's dtype it
shows how much a sound computation rounds. Nothing here calls our kernels, so a fault of theirs is seen too.

Shapes: T tokens, D width of a head, V vocabulary, C completion tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...kernels.attention_rule import WALK, AttentionRule
from ...kernels.rope_scaling import attention_factor
from ...kernels.sampling_params import SamplingParams
from ...kernels.softcap import softcap
from ...kernels.truncation import scaled_logits_ref
from ...model.blocks.clamped_experts import EXPERTS, ClampedExperts
from ...model.blocks.delta_net import DeltaNet
from ...model.checkpoint import load_decoder
from ...model.config import ModelConfig
from ...model.decoder import Decoder
from ...model.lora import FUSED_TARGETS
from ...model.operation import Equation, Operation
from ...model.operations import input_names, layer_of, operation, split_name
from . import plain_delta_net

Tensor = torch.Tensor
Lookup = Callable[[str], Tensor]  # the output of an operation, [T, width], by its name (model/operations.py)

# Rows of a weight that are converted to fp64 at a time: the lm_head of a large vocabulary would take
# gigabytes.
_ROWS = 16384
# Equations with a weight. The weight of the logits may be the embedding's.
_WEIGHTED = (Equation.EMBEDDING, Equation.NORM, Equation.LINEAR)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as an engine computes with it: its config, and its weights in the engine's dtype.

    weights: by their names in the checkpoint.
    """

    config: ModelConfig
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, decoder: Decoder) -> "Checkpoint":
        """The checkpoint that a decoder was loaded from."""
        return cls(decoder.config, decoder.layout.stored_tensors(decoder.flat.detach()))

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype) -> "Checkpoint":
        """Read a folder, on the CPU. Raises ValueError (see load_decoder)."""
        return cls.of(load_decoder(folder, dtype))

    def matrix(self, name: str) -> Tensor:
        """A weight by its name, also where the checkpoint holds it as a part of another one."""
        if name in self.weights:
            return self.weights[name]
        c, (module, _, part) = self.config, name.removesuffix(".weight").rpartition(".")
        fused = next(f for f, parts in FUSED_TARGETS.items() if part in parts)
        heads = [n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)]
        widths = heads if fused == "qkv_proj" else [c.intermediate_size] * 2
        parts = self.weights[f"{module}.{fused}.weight"].split(widths)
        return parts[FUSED_TARGETS[fused].index(part)]

    @property
    def lm_head(self) -> str:
        """The name of the weight that makes the logits."""
        return "model.embed_tokens.weight" if self.config.tied else "lm_head.weight"

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.weights["model.embed_tokens.weight"].device


def weight_names(op: str, checkpoint: Checkpoint) -> tuple[str, str | None]:
    """The checkpoint's names of an operation's weight and bias ("" and None where it has none)."""
    prefix, row = split_name(op)[0], operation(op, checkpoint.config)
    if row.equation not in _WEIGHTED:
        return "", None
    if row.name == "logits":
        return checkpoint.lm_head, None
    if row.equation is Equation.EMBEDDING:
        return "model.embed_tokens.weight", None
    module = row.weight or row.transformers.module
    if module.rpartition(".")[2] in FUSED_TARGETS:
        module = f"{module.rpartition('.')[0]}.{row.name}"
    module = f"model.{prefix}{module}" if prefix else module
    bias = f"{module}.bias"
    return f"{module}.weight", bias if bias in checkpoint.weights else None


class Clamped(NamedTuple):
    """The activation of gpt-oss's experts (kernels/clamped_swiglu.py). one: what is added to up."""

    alpha: float
    limit: float
    one: float = 1.0


@dataclass(frozen=True)
class Operations:
    """The operations of one checkpoint over one sequence, computed in `dtype`.

    cut_inside: of 16 bits; what an operation keeps between its own products is cut off towards 0 to it.
    """

    checkpoint: Checkpoint
    prompt: Sequence[int]
    completion: Sequence[int]
    sampling_params: SamplingParams
    dtype: torch.dtype = torch.float64
    cut_inside: torch.dtype | None = None

    @property
    def wide(self) -> torch.dtype:
        """The dtype of norms and of the softmax, as in transformers: fp32, or fp64 where all is."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def weight(self, name: str) -> Tensor:
        """A weight in the dtype of the computation."""
        return self.checkpoint.matrix(name).to(self.dtype)

    def compute(self, op: str, lookup: Lookup) -> Tensor:
        """The output of an operation, [T, width], from its inputs."""
        config = self.checkpoint.config
        row = operation(op, config)
        x = [lookup(name).to(self.dtype) for name in input_names(op, config)]
        name, bias = weight_names(op, self.checkpoint)
        match row.equation:
            case Equation.EMBEDDING:
                ids = torch.tensor([*self.prompt, *self.completion[:-1]], device=self.checkpoint.device)
                return self.checkpoint.weights[name][ids].to(self.dtype) * row.factor
            case Equation.LINEAR:
                y = linear(x[0], self.checkpoint.matrix(name), self.weight(bias) if bias else None)
                return softcap(y if row.factor == 1.0 else y * row.factor, row.cap)
            case Equation.NORM:
                return self.norm(
                    self.norm_input(op, x[0]),
                    self.weight(name) + config.norm_plus_one,
                    config.eps if row.eps is None else row.eps,
                )
            case Equation.ROPE:
                rotating = config.rotating(layer_of(op))
                return self.rope(x[0], rotating.frequencies, factor=attention_factor(rotating.rope_scaling))
            case Equation.ATTENTION:
                rule = AttentionRule(0, row.window, row.cap)
                return self.attention(*x, row.factor, rule=rule, sinks=self.sinks(op))
            case Equation.LATENT_ROPE:
                return self.latent_rope(op, x)
            case Equation.LATENT_ATTENTION:
                return self.latent_attention(row, x, row.factor)
            case Equation.SILU_MUL:
                return F.silu(x[0]) * x[1]
            case Equation.GELU_MUL:
                return F.gelu(x[0], approximate="tanh") * x[1]
            case Equation.EXPERTS:
                # The router's logits as they are: rounded to another dtype they may choose other experts.
                logits = lookup(input_names(op, config)[1])
                return self.experts(op, x[0], self.routing(op, logits))
            case Equation.ADD_GATED:
                return x[0] + torch.sigmoid(x[2].to(self.wide)).to(self.dtype) * x[1]
            case Equation.MUL_SIGMOID:
                gate = self.query_and_gate(x[1])[1].to(self.wide)
                return x[0] * torch.sigmoid(gate).to(self.dtype)
            case Equation.CONV_SILU | Equation.DELTA_RULE | Equation.GATED_NORM:
                net, weight = self.delta_net(op)
                wide = [part.to(self.wide) for part in x]
                return plain_delta_net.compute(row.equation, net, wide, weight, config.eps).to(self.dtype)
            case Equation.SUM:
                return x[0] + x[1] * row.factor
            case Equation.LOGPROB:
                return self.logprob(x[0])

    def sinks(self, op: str) -> Tensor | None:
        """The sinks of an attention, [Hq]; None where it has none."""
        if not operation(op, self.checkpoint.config).sinks:
            return None
        return self.weight(f"model.{split_name(op)[0]}self_attn.sinks")

    def norm_input(self, op: str, x: Tensor) -> Tensor:
        """What a norm reads of x. Where a gate lies beside each query head, x is twice as wide."""
        row = operation(op, self.checkpoint.config)
        width = row.width
        if row.eps is not None:  # the norm of a latent, which a rotated key may follow
            return x[:, :width]
        return x if x.shape[1] == width else self.query_and_gate(x)[0]

    def delta_net(self, op: str) -> tuple[DeltaNet, Callable[[str], Tensor]]:
        """The gated delta net of an operation, and its weights by their names in the module, as `wide`."""
        layer = split_name(op)[0]
        net = self.checkpoint.config.blocks[int(layer.split(".")[1])][0].block
        return net, lambda name: self.weight(f"model.{layer}linear_attn.{name}").to(self.wide)

    def query_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and gates [T, Hq D] of the projection x [T, 2 Hq D], which has them side by side."""
        q, gate = x.unflatten(1, (-1, 2, self.checkpoint.config.head_dim)).unbind(2)
        return q.flatten(1), gate.flatten(1)

    def normalised(self, x: Tensor, width: int, eps: float) -> Tensor:
        """x [T, n * width] divided by the root mean square of each group of `width`, unweighted."""
        groups = x.to(self.wide).reshape(len(x), -1, width)
        scale = torch.rsqrt((groups * groups).mean(dim=2, keepdim=True) + eps)
        return (groups * scale).to(self.dtype)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the width of `weight`: over the row, or over each head."""
        return (self.normalised(x, len(weight), eps) * weight).reshape(x.shape)

    def rope(
        self,
        x: Tensor,
        frequencies: Sequence[float],
        shift: int = 0,
        interleaved: bool = False,
        factor: float = 1.0,
    ) -> Tensor:
        """Rotary embedding of the first elements of heads [T, n * D]. shift is added to the positions.

        factor: of cos and sin.
        interleaved: rotates neighbours (0, 1), (2, 3), ... and not the halves of a head.
        """
        T, D = len(x), self.checkpoint.config.head_dim
        positions = torch.arange(shift, T + shift, dtype=self.wide, device=x.device)
        angles = torch.outer(positions, torch.tensor(frequencies, dtype=self.wide, device=x.device))
        cos, sin = ((t * factor).to(self.dtype).unsqueeze(1) for t in (angles.cos(), angles.sin()))
        heads, rest = x.reshape(T, -1, D).tensor_split([2 * len(frequencies)], dim=2)
        if interleaved:
            a, b = heads[..., ::2], heads[..., 1::2]
            pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(2)
            return torch.cat([pairs, rest], dim=2).reshape(x.shape)
        a, b = heads.chunk(2, dim=2)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=2).reshape(x.shape)

    def latent_attention(self, row: Operation, x: Sequence[Tensor], scale: float) -> Tensor:
        """Attention [T, H * V] of queries, keys, and what has each head's k' and v."""
        c, (q, k, kv) = self.checkpoint.config, x
        width = row.width // c.heads
        v = F.pad(kv.reshape(len(kv), c.heads, -1)[..., -width:], (0, c.head_dim - width))
        o = self.attention(q, k, v, scale).reshape(len(q), c.heads, -1)
        return o[..., :width].flatten(1)

    def latent_rope(self, op: str, x: Sequence[Tensor], exchanged: bool = False) -> Tensor:
        """Queries or keys [T, H * D] of latent attention: of q; or of the latent with r, and of k' and v.

        exchanged: halves are rotated in place of neighbours, or neighbours in place of halves.
        """
        c = self.checkpoint.config
        block = c.blocks[layer_of(op)][0].block
        unrotated = c.head_dim - c.rotary_dim
        heads = x[-1].reshape(len(x[-1]), c.heads, -1)
        rotated = heads[..., unrotated:] if len(x) == 1 else x[0][:, None, -c.rotary_dim :]
        if block.interleaved != exchanged:
            rotated = torch.cat([rotated[..., ::2], rotated[..., 1::2]], dim=-1)
        both = torch.cat([rotated.expand(-1, c.heads, -1), heads[..., :unrotated]], dim=-1)
        y = self.rope(both.flatten(1), c.frequencies, factor=attention_factor(c.rope_scaling))
        y = y.reshape(both.shape)
        if block.in_place:
            y = torch.cat(
                [y[..., : c.rotary_dim].unflatten(-1, (2, -1)).mT.flatten(-2), y[..., c.rotary_dim :]], -1
            )
        return y.roll(-c.rotary_dim, dims=-1).flatten(1)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        causal: bool = True,
        tiled: bool = False,
        rule: AttentionRule = WALK,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of q [T, Hq * D] over k and v [T, Hkv * D], one head at a time.

        sinks [Hq]: a score more of each row, without a value. tiled: query head i reads key-value head i
        modulo Hkv, and not i // (Hq / Hkv).
        """
        c, T = self.checkpoint.config, len(q)
        heads_q, heads_k, heads_v = (x.reshape(T, -1, c.head_dim) for x in (q, k, v))
        scale = c.head_dim**-0.5 if scale is None else scale
        rows, keys = torch.arange(T, device=q.device).unsqueeze(1), torch.arange(T, device=q.device)
        hidden = (keys > rows) & causal | (keys <= rows - (rule.window or T))
        outputs = []
        for i in range(c.heads):
            j = i % c.kv_heads if tiled else i // (c.heads // c.kv_heads)
            scores = (heads_q[:, i] @ heads_k[:, j].T) * scale
            scores = softcap(scores, rule.cap)
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[i].expand(T, 1).to(scores.dtype)], dim=1)
            p = torch.softmax(scores.to(self.wide), dim=1)[:, :T].to(self.dtype)
            outputs.append(p @ heads_v[:, j])
        return torch.cat(outputs, dim=1)

    def routing(
        self,
        op: str,
        logits: Tensor,
        per_token: int = 0,
        renormalise: bool | None = None,
        lower_wins: bool = True,
        corrected: bool = True,
        scaled: bool = True,
        in_groups: bool = True,
    ) -> Tensor:
        """The weight of each expert for each token, [T, E] in `wide`; 0 for one that is not chosen.

        logits [T, E]. per_token, renormalise: the checkpoint's where they are not given. lower_wins: whether
        the lower index is chosen of equally likely experts. corrected, scaled, in_groups: whether a
        bias corrects the choice, a scale multiplies the weights, and experts come of the best groups.
        """
        c, z = self.checkpoint.config.experts, logits.to(self.wide)
        p = torch.sigmoid(z) if c.sigmoid else torch.softmax(z, dim=1)
        scores = choice_scores(op, p, self.checkpoint, corrected, in_groups)
        by_index = scores if lower_wins else scores.flip(1)
        ids = by_index.sort(dim=1, descending=True, stable=True).indices[:, : per_token or c.per_token]
        ids = ids if lower_wins else p.shape[1] - 1 - ids
        q = p.gather(1, ids)
        if c.renormalise if renormalise is None else renormalise:
            q = q / q.sum(dim=1, keepdim=True)
        if c.grouped and scaled:
            q = q * c.grouped.scale
        return torch.zeros_like(p).scatter(1, ids, q)

    def experts(self, op: str, x: Tensor, routing: Tensor, clamped: Clamped | None = None) -> Tensor:
        """The weighted sum of the experts of x [T, D]; routing [T, E]. Weights are rounded to the dtype.

        clamped: the activation of gpt-oss's experts; None is the checkpoint's.
        """
        layer, y = f"model.{split_name(op)[0]}", torch.zeros_like(x)
        for e in range(routing.shape[1]):
            rows = routing[:, e].nonzero().flatten()
            if len(rows):
                expert_rows = self._expert(layer, e, x[rows], clamped)
                y[rows] += expert_rows * routing[rows, e].to(self.dtype).unsqueeze(1)
        return y

    def _expert(self, layer: str, e: int, x: Tensor, clamped: Clamped | None) -> Tensor:
        mixture = self.checkpoint.config.mixture
        if isinstance(mixture, ClampedExperts):

            def affine(name: str, x: Tensor) -> Tensor:
                stored = f"{layer}{EXPERTS}.{name}_proj"
                return x @ self.weight(stored)[e] + self.weight(f"{stored}_bias")[e]

            down = partial(affine, "down")
            both, (alpha, limit, one) = affine("gate_up", x), clamped or Clamped(mixture.alpha, mixture.limit)
            gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
            h = (up + one) * (gate * torch.sigmoid(gate * alpha))
        else:
            gate, up, down_T = (self.weight(layer + name) for name in mixture.matrices_of(e))
            h, down = F.silu(x @ gate.T) * (x @ up.T), lambda h: h @ down_T.T
        return down(h if self.cut_inside is None else cut(h, self.cut_inside))

    def logprob(self, logits: Tensor, sampling_params: SamplingParams | None = None) -> Tensor:
        """logits [T, V] -> logp [C, 1] of the completion."""
        params = self.sampling_params if sampling_params is None else sampling_params
        z = scaled_logits_ref(logits[-len(self.completion) :], params)
        drawn = torch.tensor([*self.completion], device=z.device).unsqueeze(1)
        return torch.log_softmax(z.to(self.wide), dim=1).gather(1, drawn)


def choice_scores(
    op: str, p: Tensor, checkpoint: Checkpoint, corrected: bool = True, in_groups: bool = True
) -> Tensor:
    """By what the router of the layer of `op` chooses experts with the probabilities or scores p, [T, E].

    It is -inf in groups that are not chosen. corrected, in_groups: as for Operations.routing.
    """
    mixture = checkpoint.config.mixture
    if mixture.experts.grouped is None:
        return p
    if mixture.experts.sigmoid and corrected:
        p = p + checkpoint.weights[f"model.{split_name(op)[0]}{mixture.bias_name}"].to(p.device, p.dtype)
    choice = mixture.choice
    if choice.groups == 1 or not in_groups:
        return p
    groups, judges = p.unflatten(1, (choice.groups, -1)), 2 if mixture.experts.sigmoid else 1
    best = groups.topk(judges, dim=2).values.sum(dim=2).sort(dim=1, descending=True, stable=True).indices
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, best[:, : choice.top_groups], True)
    return groups.masked_fill(~kept.unsqueeze(2), float("-inf")).flatten(1)


def cut(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x fp64, cut off towards 0 to a dtype of 16 bits, as fp64."""
    nearest = x.to(dtype)
    beyond = nearest.double().abs() > x.abs()
    # Floats are sign and magnitude: one less in the integer view is one step towards 0.
    return (nearest.view(torch.int16) - beyond.to(torch.int16)).view(dtype).double()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K] of any dtype -> [T, N] in the dtype of x."""
    y = torch.cat([x @ rows.to(x.dtype).T for rows in weight.split(_ROWS)], dim=1)
    return y if bias is None else y + bias
