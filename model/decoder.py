"""The decoder: one forward for training, prefill, chunked prefill and decode.

    x = embed(ids);  per layer: x += attention(norm(x)); x += mlp(norm(x));  h = norm(x);  logits = h head^T

Shapes: T tokens of packed sequences, D hidden size, Hq query heads, Hkv key-value heads. What differs between
training and sampling is the context only: how attention finds its keys (PackedContext here, SampleContext in
prompts.py, CachedContext in cache.py). Everything else works on rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from ..kernels.attention import attention, varlen_plan
from ..kernels.backend import on_triton
from ..kernels.embedding import check_ids, embedding
from ..kernels.grad import accumulate_dtype
from ..kernels.linear import linear
from ..kernels.order import ROW_TILE, Blocks, token_blocks
from ..kernels.rms_norm import add_rms_norm, qk_norm, rms_norm
from ..kernels.rope import rope, rope_table, rope_table_fp32
from ..kernels.silu_mul import silu_mul
from .config import ModelConfig
from .weights import Layout

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [T, D / 2]
# Called with the name and the output of each operation: model/op_names.py. Fused ones are qkv, qk_norm, rope
# and gate_up.
Hook = Callable[[str, torch.Tensor], None]


def no_hook(name: str, x: torch.Tensor) -> None:
    """The hook of a forward that nobody listens to."""


class Numerics(NamedTuple):
    """Dtypes other than the compute dtype; None is the compute dtype."""

    lm_head: torch.dtype | None = None  # of the logits' matrix product
    cache: torch.dtype | None = (
        None  # keys and values are rounded to it before attention reads them, and stored in it where it is narrower
    )


COMPUTE = Numerics()


def named_numerics(head_dtype: str, cache_dtype: str) -> Numerics:
    """Numerics by the names of precision.head_dtype and cache_dtype; "compute" is the compute dtype."""
    return Numerics(
        *(None if name == "compute" else getattr(torch, name) for name in (head_dtype, cache_dtype))
    )


class _RoundThrough(torch.autograd.Function):
    """x rounded to a dtype and back; the gradient passes as it is."""

    @staticmethod
    def forward(ctx, x, dtype):
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class Context(Protocol):
    """How the tokens of one forward relate: positions [T], token blocks, and attention."""

    positions: torch.Tensor
    blocks: Blocks | None

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Causal attention of q [T, Hq, D] over this context's keys, k and v [T, Hkv, D] being the new ones."""
        ...


class KeepingContext(Context, Protocol):
    """A context that keeps keys and values."""

    def keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take those of the last layer, k and v [T, Hkv, D]. Those of the others come with `attend`."""
        ...


class PackedContext:
    """Whole sequences, packed one after another. lengths [S] in tokens, summing to T.

    After them may come `padding` rows that nobody reads: one more sequence, in no token block, that no
    gradient reaches.
    """

    def __init__(self, lengths: Sequence[int], config: ModelConfig, padding: int = 0):
        filled = [*lengths, padding] if padding else list(lengths)
        self.positions = torch.from_numpy(
            np.concatenate([*map(np.arange, lengths), np.zeros(padding, np.int64)])
        )
        self.blocks = token_blocks(lengths)
        self._plan = varlen_plan(filled, config.heads, config.kv_heads)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See Context."""
        return attention(q, k, v, self._plan, scale)


def with_padding(ids: torch.Tensor, decoder: "Decoder") -> tuple[torch.Tensor, int]:
    """ids [T] followed by as many padding ids as make whole row tiles, so that no matrix product of the
    reference has a partial one.
    """
    padding = 0 if on_triton(decoder.flat) else -len(ids) % ROW_TILE
    return F.pad(ids, (0, padding)), padding


def _rope_table(c: ModelConfig, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [positions, D / 2] in the compute dtype:

    on Triton as vLLM's models have them, in fp64 before the rounding else.
    """
    if on_triton(flat):
        return rope_table_fp32(
            c.head_dim, c.rope_theta, c.rope_llama3, c.max_positions, flat.dtype, flat.device
        )
    return rope_table(c.frequencies, c.max_positions, flat.dtype)


class Decoder:
    """Weights in one dtype, and the forward over them.

    `flat` [layout.numel] holds the weights in the compute dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        flat: torch.Tensor,
        layout: Layout | None = None,
        numerics: Numerics = COMPUTE,
    ):
        self.config, self.flat, self.numerics = config, flat, numerics
        self.layout = layout or Layout(config)
        self._cos, self._sin = (
            t.to(flat.device, accumulate_dtype(flat.dtype)) for t in _rope_table(config, flat)
        )
        self._bind()

    def _bind(self) -> None:
        self.w = {name: view.requires_grad_() for name, view in self.layout.views(self.flat.detach()).items()}
        # With tied embeddings the head is a second tensor over the same memory, so that its gradient has its
        # own buffer: summed into one, the order of the two uses would depend on the micro-batch size.
        self.lm_head = self.w["embed"].detach().requires_grad_() if self.config.tied else self.w["lm_head"]

    def move_to(self, flat: torch.Tensor) -> None:
        """Copy the weights to `flat` [layout.numel] and use those from now on.

        Views taken before are of the old memory.
        """
        self.flat = flat.copy_(self.flat.detach())
        self._bind()

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.flat.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """What a cache stores keys and values in:

        they are rounded to numerics.cache, so where that is narrower, nothing is lost.
        """
        cache = self.numerics.cache
        return cache if cache is not None and cache.itemsize < self.dtype.itemsize else self.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are, and everything is computed."""
        return self.flat.device

    def logits_weight(self) -> torch.Tensor:
        """The head in the dtype of the logits, [V, D]; hidden states are converted to it.

        Its gradient goes where the head's does.
        """
        if self.numerics.lm_head in (None, self.dtype):
            return self.lm_head
        if not hasattr(self.lm_head, "main_grad"):
            return self.lm_head.to(self.numerics.lm_head)
        wide = self.lm_head.detach().to(self.numerics.lm_head).requires_grad_()
        wide.main_grad = self.lm_head.main_grad
        return wide

    def matrices(self) -> list[torch.Tensor]:
        """The weights that rows are multiplied with, each [N, K]."""
        return [w for name, w in self.w.items() if w.dim() == 2 and name != "embed"] + [
            self.lm_head
        ] * self.config.tied

    def hidden(self, ids: torch.Tensor, context: Context, hook: Hook = no_hook) -> torch.Tensor:
        """The final norm's output, [T, D], for ids [T] on any device. `hook` is given the output of every
        operation, under its name.

        Raises ValueError for an id outside the vocabulary, where it lies on the CPU (see embedding).
        """
        x, residual, rotation = self._embed(ids, context, hook)
        for i in range(self.config.layers):
            x, residual = self._layer(i, x, residual, rotation, context, hook)
        return x

    def read(self, ids: torch.Tensor, context: KeepingContext, hook: Hook = no_hook) -> None:
        """As `hidden`, for the keys and values alone, which `context` keeps:

        the last layer ends with them.
        """
        x, residual, rotation = self._embed(ids, context, hook)
        last = self.config.layers - 1
        for i in range(last):
            x, residual = self._layer(i, x, residual, rotation, context, hook)
        context.keep(*self._qkv(last, x, rotation, context, hook)[1:])

    def _embed(
        self, ids: torch.Tensor, context: Context, hook: Hook
    ) -> tuple[torch.Tensor, torch.Tensor, Rotation]:
        """The first layer's input, the residual, and cos and sin of the positions."""
        c, w = self.config, self.w
        positions = context.positions.to(self.device)
        rotation = self._cos[positions], self._sin[positions]
        if ids.device != self.device:  # the last moment at which a GPU need not be waited for
            check_ids(ids, c.vocab_size)
        residual = embedding(ids.to(self.device), w["embed"])
        hook("embed", residual)
        x = rms_norm(residual, w["layers.0.input_norm"], c.eps, context.blocks)
        hook("layers.0.input_norm", x)
        return x, residual, rotation

    def _layer(
        self,
        i: int,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: Rotation,
        context: Context,
        hook: Hook,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next layer's input (after the last, the final norm's output), and the residual."""
        c, w, at, blocks = self.config, self.w, f"layers.{i}.", context.blocks
        o = context.attend(i, *self._qkv(i, x, rotation, context, hook), c.head_dim**-0.5)
        hook(at + "attention", o)
        x = linear(o.reshape(x.shape[0], -1), w[at + "o"], w.get(at + "o_bias"), blocks)
        hook(at + "o_proj", x)
        x, residual = add_rms_norm(x, residual, w[at + "post_norm"], c.eps, blocks)
        hook(at + "attention_residual", residual)
        hook(at + "post_norm", x)
        x = linear(x, w[at + "gate_up"], None, blocks)
        hook(at + "gate_up", x)
        x = silu_mul(x)
        hook(at + "silu_mul", x)
        x = linear(x, w[at + "down"], None, blocks)
        hook(at + "down_proj", x)
        following = f"layers.{i + 1}.input_norm" if i + 1 < c.layers else "norm"
        x, residual = add_rms_norm(x, residual, w[following], c.eps, blocks)
        hook(at + "mlp_residual", residual)
        hook(following, x)
        return x, residual

    def _qkv(
        self, i: int, x: torch.Tensor, rotation: Rotation, context: Context, hook: Hook
    ) -> tuple[torch.Tensor, ...]:
        """q [T, Hq, D], k and v [T, Hkv, D] as attention reads them."""
        c, w, at, blocks = self.config, self.w, f"layers.{i}.", context.blocks
        qkv = linear(x, w[at + "qkv"], w.get(at + "qkv_bias"), blocks).view(x.shape[0], -1, c.head_dim)
        hook(at + "qkv", qkv)
        qk, v = qkv.split([c.heads + c.kv_heads, c.kv_heads], dim=1)
        if c.qk_norm:
            qk = qk_norm(qk, w[at + "q_norm"], w[at + "k_norm"], c.heads, c.eps, blocks)
            hook(at + "qk_norm", qk)
        qk = rope(qk, *rotation)
        hook(at + "rope", qk)
        q, k = qk.split([c.heads, c.kv_heads], dim=1)
        if self.numerics.cache not in (None, self.dtype):
            k, v = (_RoundThrough.apply(x, self.numerics.cache) for x in (k, v))
        return q, k, v
