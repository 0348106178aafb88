"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    q = x q^T, or q_b norm(x q_a^T);   c, r = x kv_a^T;   k', v = norm(c) kv_b^T
    q = [q', rope(q'')],  k = [k', rope(r)] of each head, with one r for all heads
    y = attention(q, k, v) o^T

Keys and values are computed of the latent c, and the cache holds them as such, each value with zeros up to
the width of a key. Zeros add nothing to another element of a sum, so every form has the bits of attention.
Shapes: T tokens of packed sequences, H heads, N and R the widths of k' and of the rotated part, V of a value.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from pydantic import FiniteFloat, PositiveInt

from ...kernels.linear import linear
from ...kernels.rms_norm import rms_norm
from ...kernels.rope import rope
from ...kernels.share_key import share_key
from ..config_file import ConfigFile, Fields
from ..context import Context, KeepingContext
from ..kv_rounding import rounded_kv
from ..operation import Equation, Operation, Shown, Site, Work, norm_row, projection_row
from ..sizes import Sizes
from .block import LayerRun, LayerWeights, Mixer, Rows, Weight

# Of the norms of latents. transformers' classes take no other, whatever rms_norm_eps says.
_EPS = 1e-6
# Of `zerokl init`.
SMALL_LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,  # narrower than a key, as the published ones
    "head_dim": 16,  # of the rotated part, as transformers writes it
    "num_key_value_heads": None,
}


class _LatentFields(Fields):
    kv_lora_rank: PositiveInt = 512
    qk_nope_head_dim: PositiveInt = 128
    qk_rope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 128
    qk_head_dim: PositiveInt | None = None
    rope_interleave: bool = True


class _RankField(Fields):
    q_lora_rank: PositiveInt | None = None


class _YarnScale(Fields):
    factor: FiniteFloat = 1.0
    mscale_all_dim: FiniteFloat = 0.0


def latent_widths(config: ConfigFile) -> tuple[int, int]:
    """The width of a head's keys, and of the rotated part of it."""
    c = config.read(_LatentFields)
    return c.qk_nope_head_dim + c.qk_rope_head_dim, c.qk_rope_head_dim


def read_latent(config: ConfigFile, in_place: bool = False) -> "LatentAttention":
    """The attention of a config.json. in_place: see LatentAttention. Raises UnsupportedError."""
    common, c = config.fields, config.read(_LatentFields)
    width, rotated = latent_widths(config)
    repeated = {
        "num_key_value_heads": common.num_attention_heads,
        "qk_head_dim": width,
        "head_dim": rotated,
    }
    for name, value in repeated.items():
        if (given := config.raw.get(name)) not in (None, value):
            config.refuse(name, given, f"{value} is what latent attention has by the other fields")
    if c.v_head_dim > width:
        config.refuse("v_head_dim", c.v_head_dim, f"a value is at most as wide as a key ({width})")
    # A null means that queries have no latent, and a file without the key has the class's default.
    rank = config.read(_RankField, {"q_lora_rank": config.value("q_lora_rank")}).q_lora_rank
    rope_fields = common.rope_parameters or common.rope_scaling
    yarn = ConfigFile(rope_fields, config.source).read(_YarnScale)
    factor = 1.0
    if rope_fields.get("rope_type", rope_fields.get("type", "default")) != "default" and yarn.factor > 1.0:
        factor = 0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1.0 if yarn.mscale_all_dim else 1.0
    return LatentAttention(
        q_rank=rank,
        kv_rank=c.kv_lora_rank,
        value_width=c.v_head_dim,
        scale=width**-0.5 * factor * factor,
        interleaved=c.rope_interleave,
        in_place=in_place,
        qkv_bias=common.attention_bias,
    )


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """Causal attention whose keys and values come of one narrow latent of each token."""

    kv_rank: int
    value_width: int
    scale: float
    q_rank: int | None = None  # None: queries come of x
    interleaved: bool = True  # neighbours are rotated together, and not halves
    in_place: bool = (
        False  # rotated neighbours stay neighbours; else their firsts come first, then the seconds
    )
    qkv_bias: bool = False  # of q_a, kv_a and o

    def _matrices(self, c: Sizes) -> dict[str, tuple[str, int, int]]:
        """Name in the layer -> module, inputs and outputs."""
        D, q = c.hidden_size, c.heads * c.head_dim
        if self.q_rank is None:
            matrices = {"q": ("q_proj", D, q)}
        else:
            matrices = {"q_a": ("q_a_proj", D, self.q_rank), "q_b": ("q_b_proj", self.q_rank, q)}
        unrotated = c.head_dim - c.rotary_dim
        return matrices | {
            "kv_a": ("kv_a_proj_with_mqa", D, self.kv_rank + c.rotary_dim),
            "kv_b": ("kv_b_proj", self.kv_rank, c.heads * (unrotated + self.value_width)),
            "o": ("o_proj", c.heads * self.value_width, D),
        }

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """The matrices [outputs, inputs], the biases, and the norms of the latents."""
        for name, (module, inputs, outputs) in self._matrices(c).items():
            yield Weight(name, (inputs,), ((f"self_attn.{module}.weight", outputs),))
            if self.qkv_bias and name in ("q_a", "kv_a", "o"):
                yield Weight(f"{name}_bias", (), ((f"self_attn.{module}.bias", outputs),))
        if self.q_rank is not None:
            yield Weight("q_a_norm", (), (("self_attn.q_a_layernorm.weight", self.q_rank),))
        yield Weight("kv_a_norm", (), (("self_attn.kv_a_layernorm.weight", self.kv_rank),))

    def operations(self, c: Sizes, x: str) -> tuple[Operation, ...]:
        rows, reads = [], {"q": x, "q_a": x, "q_b": "q_a_norm", "kv_a": x, "kv_b": "kv_a_norm"}
        widths = {"q_a": self.q_rank, "kv_a": self.kv_rank}
        for name, (module, inputs, outputs) in self._matrices(c).items():
            if name == "o":
                rows += self._attended(c)
            source, site = reads.get(name, "attention"), f"self_attn.{module}"
            kept = 0 if name == "o" else outputs
            row = projection_row(f"{name}_proj", source, inputs, outputs, site, kept=kept)
            if name == "kv_b":  # transformers gives it its latents as one head, before the tokens
                row = replace(row, transformers=Site(site, heads_first=True), vllm=None)
            rows.append(row)
            if name in widths:
                site = f"self_attn.{name}_layernorm"
                norm = f"{name}_norm"
                rows.append(norm_row(norm, f"{name}_proj", widths[name], site, kept=widths[name], eps=_EPS))
        return tuple(rows)

    def _attended(self, c: Sizes) -> Iterator[Operation]:
        """The keys and queries as attention reads them, and attention."""
        heads, query = c.heads * c.head_dim, "q_proj" if self.q_rank is None else "q_b_proj"
        for p, read, kind in (("q", (query,), Shown.QUERY), ("k", ("kv_a_proj", "kv_b_proj"), Shown.KEY)):
            yield Operation(
                name=f"{p}_rope",
                equation=Equation.LATENT_ROPE,
                reads=read,
                width=heads,
                kept=heads,
                transformers=Site("self_attn", kind),
                vllm=None,
                remedy="Compare rope_theta, rope_interleave, rope_scaling and the positions of both engines.",
            )
        yield Operation(
            name="attention",
            equation=Equation.LATENT_ATTENTION,
            reads=("q_rope", "k_rope", "kv_b_proj"),
            width=c.heads * self.value_width,
            factor=self.scale,
            flops=Work(pairs=4 * heads),
            kept=4 * heads,
            kept_fp32=c.heads,
            transformers=Site("self_attn.o_proj", Shown.INPUT),
            vllm=None,
            remedy="Compare the mask, the scale (YaRN's mscale_all_dim) and the dtype of the cache.",
        )

    def forward(self, w: LayerWeights, rows: Rows, layer: LayerRun) -> Rows:
        q, k, v = self._qkv(w, rows.x, layer, rows.context)
        o = rows.context.attend(layer.i, q, k, v, self.scale, layer.numerics.attention)
        o = o[..., : self.value_width].flatten(1)
        layer.show("attention", o)
        if layer.is_last:
            rows = rows.narrowed(o)
            o = rows.x
        x = self._product("o", o, w, layer, rows.context)
        return Rows(x, rows.residual, rows.context)

    def keep(self, w: LayerWeights, x: torch.Tensor, layer: LayerRun, context: KeepingContext) -> None:
        context.keep(*self._qkv(w, x, layer, context)[1:])

    def _product(
        self, name: str, x: torch.Tensor, w: LayerWeights, layer: LayerRun, context: Context
    ) -> torch.Tensor:
        y = linear(x, w[name], w.get(f"{name}_bias"), context.in_pass, layer.numerics.tiles)
        layer.show(f"{name}_proj", y)
        return y

    def _normed(
        self, name: str, x: torch.Tensor, w: LayerWeights, layer: LayerRun, context: Context
    ) -> torch.Tensor:
        y = rms_norm(x, w[name], _EPS, context.in_pass)
        layer.show(name, y)
        return y

    def _qkv(
        self, w: LayerWeights, x: torch.Tensor, layer: LayerRun, context: Context
    ) -> tuple[torch.Tensor, ...]:
        """q, k and v as attention reads them, [T, H, N + R] each: v with zeros after its elements."""
        c, rest = layer.config, (w, layer, context)
        if self.q_rank is None:
            q = self._product("q", x, *rest)
        else:
            latent = self._normed("q_a_norm", self._product("q_a", x, *rest), *rest)
            q = self._product("q_b", latent, *rest)
        unrotated = c.head_dim - c.rotary_dim
        q, q_rot = q.view(len(x), c.heads, -1).split([unrotated, c.rotary_dim], dim=-1)
        latent, k_rot = self._product("kv_a", x, *rest).split([self.kv_rank, c.rotary_dim], dim=-1)
        latent = self._normed("kv_a_norm", latent.contiguous(), *rest)
        kv = self._product("kv_b", latent, *rest).view(len(x), c.heads, -1)
        k, v = kv.split([unrotated, self.value_width], dim=-1)
        rotated = torch.cat([q_rot, k_rot.unsqueeze(1)], dim=1)
        if self.interleaved:
            rotated = rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        rotated = rope(rotated.contiguous(), *layer.rotation)
        if self.in_place:
            rotated = rotated.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        q_rot, k_rot = rotated.split([c.heads, 1], dim=1)
        q = torch.cat([q, q_rot], dim=-1)
        k = torch.cat([k, share_key(k_rot.squeeze(1), c.heads)], dim=-1)
        layer.show("q_rope", q)
        layer.show("k_rope", k)
        v = F.pad(v, (0, c.head_dim - self.value_width))
        return q, rounded_kv(k, layer.numerics), rounded_kv(v, layer.numerics)
