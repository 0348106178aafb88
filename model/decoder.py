"""The decoder: one forward for training, prefill, chunked prefill and decode.

    x = embed(ids);   per layer:  x += attention(norm(x)),  x += mlp(norm(x))
    h = norm(x);      logits = h lm_head^T

Shapes: T tokens of packed sequences, D hidden size (of a head, in [T, heads, D]), Hq query heads, Hkv
key-value heads, V vocabulary.

Training and sampling differ in the context only, which is how attention finds its keys: PackedContext here,
SampleContext in prompts.py, CachedContext in cache.py. Everything else works on rows.
A layer asks a source of weights for its own (weights.py), and for them only: the addition of an MLP's output
belongs to the norm of the next layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ..kernels.attention import attention, varlen_plan
from ..kernels.backend import on_triton
from ..kernels.decode_heads import QKNormWeights, heads_to_cache
from ..kernels.embedding import check_ids, embedding
from ..kernels.grad import GradBuffer, accumulate_dtype
from ..kernels.linear import linear
from ..kernels.logprob import logits_rows
from ..kernels.low_rank import LowRankBuffers
from ..kernels.order import ROW_TILE, token_blocks
from ..kernels.passes import Pass
from ..kernels.qk_norm import qk_norm
from ..kernels.rms_norm import add_rms_norm, rms_norm
from ..kernels.rope import rope, rope_table, rope_table_fp32
from ..kernels.sampling_params import SamplingParams
from ..kernels.silu_mul import silu_mul
from ..kernels.upload import Tables, upload_tables
from .cache import DecodeContext
from .config import ModelConfig
from .experts import run_experts
from .kv_rounding import rounded_kv
from .numerics import COMPUTE, Numerics
from .routing import FREE, Routing
from .weights import VALUE_HEAD, FlatWeights, LayerWeights, Layout, WeightSource

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [T, D / 2]
# What a layer gives to the next one, [T, D] each: the output of its MLP, and the residual to add it to.
Stream = tuple[torch.Tensor | None, torch.Tensor]
# Called with the name and the output of each operation (names: operations.py). The decoder computes some
# operations as one; these are called qkv, qk_norm, rope and gate_up.
Hook = Callable[[str, torch.Tensor], None]
Buffers = Mapping[torch.Tensor, GradBuffer | LowRankBuffers]  # of the gradients, by weight
NO_BUFFERS: Buffers = MappingProxyType({})


def no_hook(name: str, x: torch.Tensor) -> None:
    """The hook that does nothing."""


class Context(Protocol):
    """How the tokens of one forward belong together: positions [T], attention, and the operations' pass.

    `routing` knows the experts of the rows (routing.py).
    `in_pass` has the token blocks, the buffers of the weights' gradients, and the packed weights.
    `tables` is what the forward and its backward read on a device, beside the ids, and what may lie on the
    host yet. It goes to the device together with the ids (kernels/upload.py), at the latest in the forward.
    """

    positions: torch.Tensor
    in_pass: Pass
    routing: Routing
    tables: Sequence[Tables]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Causal attention of q [T, Hq, D] over the keys of this context.

        k and v [T, Hkv, D] are the keys and values of the new tokens.
        """
        ...


class KeepingContext(Context, Protocol):
    """A context that keeps keys and values."""

    def keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take the last layer's k and v [T, Hkv, D]. `attend` takes those of all other layers."""
        ...


class PackedContext:
    """Whole sequences, packed one after another. lengths [S] in tokens, summing to T.

    `padding` rows may follow, which nobody reads. They are one more sequence for attention. They are in no
    token block, and no gradient reaches them.
    shards [S]: the virtual shard of each sequence, in ascending order; None where all are of shard 0.
    buffers: where the weights' gradients are summed (kernels/passes.py). routing: of the rows.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        config: ModelConfig,
        padding: int = 0,
        shards: Sequence[int] | None = None,
        buffers: Buffers = NO_BUFFERS,
        routing: Routing = FREE,
    ):
        self.routing = routing
        all_lengths = [*lengths, padding] if padding else list(lengths)
        self.positions = torch.from_numpy(
            np.concatenate([*map(np.arange, lengths), np.zeros(padding, np.int64)])
        )
        self.in_pass = Pass(token_blocks(lengths, shards), buffers)
        self._plan = varlen_plan(all_lengths, config.heads, config.kv_heads)

    @property
    def tables(self) -> list[Tables]:
        """See Context."""
        return [self.in_pass.blocks, self._plan, self]

    @property
    def host_tensors(self) -> list[torch.Tensor]:
        """See upload.Tables."""
        return [self.positions]

    def arrived(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        (self.positions,) = tensors

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return attention(q, k, v, self._plan, scale)


def with_padding(ids: torch.Tensor, decoder: "Forward") -> tuple[torch.Tensor, int]:
    """ids [T] and padding ids after them, and the number of padding ids.

    The padding fills the last row tile, so that no matrix product of the reference has a partial tile. Triton
    needs no padding.
    """
    padding = 0 if on_triton(decoder.weights.norm) else -len(ids) % ROW_TILE
    return F.pad(ids, (0, padding)), padding


def _rope_table(c: ModelConfig, like: torch.Tensor) -> Rotation:
    """cos and sin, [positions, D / 2], rounded to the dtype of `like`, on its device.

    On Triton they are computed as vLLM's models compute them, otherwise in fp64.
    """
    if on_triton(like):
        table = rope_table_fp32(
            c.head_dim, c.rope_theta, c.rope_llama3, c.max_positions, like.dtype, like.device
        )
    else:
        table = rope_table(c.frequencies, c.max_positions, like.dtype)
    return tuple(t.to(like.device, accumulate_dtype(like.dtype)) for t in table)


class NarrowingContext(ABC):
    """A Context of which nobody reads some rows after the attention of the last layer (one_pass.py)."""

    narrowed: Context  # of the rows that are left

    @abstractmethod
    def narrow(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of x [T, D] that are left."""


class Forward:
    """The forward over a source of weights.

    Decoder has them in one flat tensor, and CausalLM (causal_lm.py) as Parameters. With `recompute` a
    backward computes each layer again instead of keeping its activations. That decides no bit.
    """

    weights: WeightSource
    _rope: Rotation  # of all positions

    def __init__(self, config: ModelConfig, numerics: Numerics = COMPUTE, recompute: bool = False):
        self.config, self.numerics, self.recompute = config, numerics, recompute

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.weights.norm.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights and of all computation."""
        return self.weights.norm.device

    @property
    def lm_head(self) -> torch.Tensor:
        """The weight of the logits, [V, D]; see FlatWeights."""
        return self.weights.lm_head

    @property
    def value_head(self) -> torch.Tensor | None:
        """The critic's head, [D]; None where there is no critic."""
        return None

    def logits_weight(self) -> torch.Tensor:
        """lm_head in the dtype of the logits, [V, D]; the caller converts hidden states to that dtype.

        Where that is another dtype, it is a copy, through which the gradient goes to lm_head.
        """
        return self.lm_head if self.numerics.lm_head is None else self.lm_head.to(self.numerics.lm_head)

    def logits_weight_and_buffers(self, buffers: Buffers) -> tuple[torch.Tensor, Buffers]:
        """`logits_weight`, and the buffers in which its gradient has the buffer of lm_head."""
        weight, buffer = self.logits_weight(), buffers.get(self.lm_head)
        if weight is self.lm_head or buffer is None:
            return weight, buffers
        weight = weight.detach().requires_grad_()
        return weight, {weight: buffer}

    def logits_rows(self, sampling_params: SamplingParams) -> int:
        """The rows of logits that linear_logprob holds at once."""
        dtype = self.numerics.lm_head or self.dtype
        return logits_rows(self.config.vocab_size, self.device, dtype, sampling_params)

    def hidden(self, ids: torch.Tensor, context: Context, hook: Hook = no_hook) -> torch.Tensor:
        """The final norm's output, [T, D], for ids [T] on any device.

        `hook` is called with the name and the output of every operation. Raises ValueError for an id outside
        the vocabulary, if the ids are on the CPU (see embedding).
        """
        c, stream = self.config, self._embed(ids, context, hook)
        rotation = self._rotation(context)
        for i in range(c.layers):
            stream = self._run_layer(i, stream, rotation, context, hook)
        if isinstance(context, NarrowingContext):
            context = context.narrowed
        x, residual = add_rms_norm(*stream, self.weights.norm, c.eps, context.in_pass)
        hook(f"layers.{c.layers - 1}.mlp_residual", residual)
        hook("norm", x)
        return x

    def read(self, ids: torch.Tensor, context: KeepingContext, hook: Hook = no_hook) -> None:
        """As `hidden`, but only for the keys and values, which `context` keeps.

        The forward ends with the keys and values of the last layer.
        """
        stream, last = self._embed(ids, context, hook), self.config.layers - 1
        rotation = self._rotation(context)
        for i in range(last):
            stream = self._run_layer(i, stream, rotation, context, hook)
        with self.weights.layer(last) as w:
            x, _ = self._input_norm(last, w, stream, context, hook)
            context.keep(*self._qkv(last, w, x, rotation, context, hook)[1:])

    def check_ids(self, ids: torch.Tensor) -> None:
        """Raise ValueError for ids of the host that are outside the vocabulary, before they go to a GPU.

        There the host would have to wait for the GPU. On a CPU `embedding` checks them.
        """
        if ids.device != self.device:
            check_ids(ids, self.config.vocab_size)

    def _rotation(self, context: Context) -> Rotation:
        """cos and sin of the positions."""
        cos, sin = self._rope
        return cos[context.positions], sin[context.positions]

    def _embed(self, ids: torch.Tensor, context: Context, hook: Hook) -> Stream:
        """The stream before the first layer, which has nothing to add."""
        self.check_ids(ids)
        if not ids.device == context.positions.device == self.device:
            (ids,) = upload_tables(self.device, context.tables, ids)
        residual = embedding(ids, self.weights.embed, context.in_pass)
        hook("embed", residual)
        return None, residual

    def _run_layer(self, i: int, *args: Any) -> Stream:
        """_layer, whose activations are kept for the backward, or computed again there."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._layer, i, *args, use_reentrant=False, preserve_rng_state=False)
        return self._layer(i, *args)

    def _layer(self, i: int, stream: Stream, rotation: Rotation, context: Context, hook: Hook) -> Stream:
        """The stream after layer i, of whose weights the layer asks once."""
        with self.weights.layer(i) as w:
            return self._compute_layer(i, w, stream, rotation, context, hook)

    def _compute_layer(
        self, i: int, w: LayerWeights, stream: Stream, rotation: Rotation, context: Context, hook: Hook
    ) -> Stream:
        """The stream after layer i with the weights w."""
        x, residual = self._input_norm(i, w, stream, context, hook)
        o = self._attention(i, w, x, rotation, context, hook)
        if isinstance(context, NarrowingContext) and i == self.config.layers - 1:
            context, residual = context.narrowed, context.narrow(residual)
        x = linear(o.flatten(1), w["o"], w.get("o_bias"), context.in_pass, self.numerics.tiles)
        hook(f"layers.{i}.o_proj", x)
        x, residual = add_rms_norm(x, residual, w["post_norm"], self.config.eps, context.in_pass)
        hook(f"layers.{i}.attention_residual", residual)
        hook(f"layers.{i}.post_norm", x)
        return self._mlp(i, w, x, context, hook), residual

    def _input_norm(
        self, i: int, w: LayerWeights, stream: Stream, context: Context, hook: Hook
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of attention and the residual, [T, D] each. Adds the output of the MLP before it."""
        (x, residual), eps, in_pass = stream, self.config.eps, context.in_pass
        if x is None:
            x = rms_norm(residual, w["input_norm"], eps, in_pass)
        else:
            x, residual = add_rms_norm(x, residual, w["input_norm"], eps, in_pass)
            hook(f"layers.{i - 1}.mlp_residual", residual)
        hook(f"layers.{i}.input_norm", x)
        return x, residual

    def _attention(
        self, i: int, w: LayerWeights, x: torch.Tensor, rotation: Rotation, context: Context, hook: Hook
    ) -> torch.Tensor:
        """Attention without its output projection. x [T, D] -> [T, Hq, D of a head]."""
        scale = self.config.head_dim**-0.5
        if isinstance(context, DecodeContext) and hook is no_hook and self._cache_rounds_once:
            q = self._heads_to_cache(i, w, x, rotation, context)
            o = context.attend_cached(i, q, scale)
        else:
            o = context.attend(i, *self._qkv(i, w, x, rotation, context, hook), scale)
        hook(f"layers.{i}.attention", o)
        return o

    def _mlp(self, i: int, w: LayerWeights, x: torch.Tensor, context: Context, hook: Hook) -> torch.Tensor:
        """x [T, D] -> [T, D]."""
        if self.config.is_sparse(i):
            return run_experts(
                self.config.experts,
                w,
                x,
                context.in_pass,
                self.numerics.tiles,
                self.numerics.router,
                lambda name, y: hook(f"layers.{i}.{name}", y),
                lambda logits, ids: context.routing.experts(i, logits, ids),
            )
        x = linear(x, w["gate_up"], None, context.in_pass, self.numerics.tiles)
        hook(f"layers.{i}.gate_up", x)
        x = silu_mul(x)
        hook(f"layers.{i}.silu_mul", x)
        x = linear(x, w["down"], None, context.in_pass, self.numerics.tiles)
        hook(f"layers.{i}.down_proj", x)
        return x

    def _qkv(
        self, i: int, w: LayerWeights, x: torch.Tensor, rotation: Rotation, context: Context, hook: Hook
    ) -> tuple[torch.Tensor, ...]:
        """q [T, Hq, D], k and v [T, Hkv, D], as attention reads them."""
        c, in_pass, qkv = self.config, context.in_pass, self._projected_heads(w, x, context)
        hook(f"layers.{i}.qkv", qkv)
        qk, v = qkv.split([c.heads + c.kv_heads, c.kv_heads], dim=1)
        if c.qk_norm:
            qk = qk_norm(qk, w["q_norm"], w["k_norm"], c.heads, c.eps, in_pass)
            hook(f"layers.{i}.qk_norm", qk)
        qk = rope(qk, *rotation)
        hook(f"layers.{i}.rope", qk)
        q, k = qk.split([c.heads, c.kv_heads], dim=1)
        return q, rounded_kv(k, self.numerics), rounded_kv(v, self.numerics)

    def _projected_heads(self, w: LayerWeights, x: torch.Tensor, context: Context) -> torch.Tensor:
        """x [T, D] -> [T, Hq + 2 Hkv, D]."""
        qkv = linear(x, w["qkv"], w.get("qkv_bias"), context.in_pass, self.numerics.tiles)
        return qkv.view(x.shape[0], -1, self.config.head_dim)

    @property
    def _cache_rounds_once(self) -> bool:
        """Whether keys and values need no other rounding than to the dtype that the cache stores."""
        return self.numerics.kv is None and self.numerics.cache in (None, self.cache_dtype)

    def _heads_to_cache(
        self, i: int, w: LayerWeights, x: torch.Tensor, rotation: Rotation, context: DecodeContext
    ) -> torch.Tensor:
        """As `_qkv` without a hook, with the keys and values in the cache. x [n, D] -> q [n, Hq, D]."""
        c, qkv = self.config, self._projected_heads(w, x, context)
        norm = QKNormWeights(w["q_norm"], w["k_norm"], c.eps) if c.qk_norm else None
        return heads_to_cache(qkv, norm, *rotation, c.heads, context.slots(i))


class Decoder(Forward):
    """Weights in one flat tensor, and the forward over them.

    `flat` [layout.numel] holds the weights in the compute dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        flat: torch.Tensor,
        layout: Layout | None = None,
        numerics: Numerics = COMPUTE,
        recompute: bool = False,
    ):
        super().__init__(config, numerics, recompute)
        self.flat, self.layout = flat, layout or Layout(config)
        self.weights = FlatWeights(self.layout, flat)
        self._rope = _rope_table(config, flat)

    @property
    def w(self) -> dict[str, torch.Tensor]:
        """All weights by name."""
        return self.weights.named

    def move_to(self, flat: torch.Tensor) -> None:
        """Copy the weights to `flat` [layout.numel] and compute with `flat` from now on.

        Views that were taken before still show the old memory.
        """
        self.flat = flat.copy_(self.flat.detach())
        self.weights = FlatWeights(self.layout, self.flat)

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype in which a cache stores keys and values.

        It is numerics.cache where that is narrower than the compute dtype, else the compute dtype. Keys and
        values were rounded to numerics.cache before, so storing them loses nothing.
        """
        cache = self.numerics.cache
        return cache if cache is not None and cache.itemsize < self.dtype.itemsize else self.dtype

    @property
    def value_head(self) -> torch.Tensor | None:
        """See Forward."""
        return self.w.get(VALUE_HEAD)

    def matrices(self) -> list[torch.Tensor]:
        """The weights of the matrix products, each [N, K]."""
        return [w for name, w in self.w.items() if w.dim() == 2 and name != "embed"] + [
            self.lm_head
        ] * self.config.tied

    def packable(self) -> list[torch.Tensor]:
        """Those of `matrices` of which a packed copy may be read: not the ones that hold many experts."""
        experts = {w for name, w in self.w.items() if ".experts." in name}
        return [w for w in self.matrices() if w not in experts]
