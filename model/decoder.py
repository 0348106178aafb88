"""The decoder: one forward for training, prefill, chunked prefill and decode.

    x = embed(ids);   per layer:  x += block(norm(x)), such as attention, then an MLP
    h = norm(x);      logits = h lm_head^T

The blocks of the layers are those of the family (families/, blocks/).

Shapes: T tokens of packed sequences, D hidden size, V vocabulary.

Training and sampling differ in the context only, which is how attention finds its keys: PackedContext in
context.py, SampleContext in prompts.py, CachedContext in cache.py. Everything else works on rows.
A layer asks a source of weights for its own (weights.py), and for them only: the addition of an MLP's output
belongs to the norm of the next layer.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ..kernels.backend import on_triton
from ..kernels.embedding import check_ids
from ..kernels.logprob import logits_rows
from ..kernels.order import ROW_TILE
from ..kernels.sampling_params import SamplingParams
from ..kernels.upload import upload_tables
from .blocks.block import LayerRun, LayerWeights, Mixer, Rotation, Rows
from .blocks.embedding import Embedding
from .blocks.rope import rotation_table
from .config import ModelConfig
from .context import Buffers, Context, Hook, KeepingContext, NarrowingContext, no_hook
from .numerics import COMPUTE, Numerics
from .offload import HERE, Offload
from .weights import NONE_UNMERGED, VALUE_HEAD, FlatWeights, Layout, UnmergedAdapters, WeightSource

# What a layer gives to the next one, [T, D] each: the output of its last block, and what to add it to.
Stream = tuple[torch.Tensor | None, torch.Tensor]
# cos and sin of each rotary embedding of the model, by the base of ModelConfig.local_rope_thetas.
Rotations = Mapping[float | None, Rotation]


def with_padding(ids: torch.Tensor, decoder: "Forward", ranks: int = 1) -> tuple[torch.Tensor, int]:
    """ids [T] and padding ids after them, and the number of padding ids.

    The padding fills the last row tile, so that no matrix product of the reference has a partial tile. Triton
    needs no padding. ranks: that have as many rows each.
    """
    padding = -len(ids) % (ranks * (1 if on_triton(decoder.weights.norm) else ROW_TILE))
    return F.pad(ids, (0, padding)), padding


def rotation_tables(config: ModelConfig, like: torch.Tensor) -> Rotations:
    """Of all positions, on the device of `like` and rounded to its dtype."""
    layers = {theta: i for i, theta in enumerate(config.local_rope_thetas)}
    return {theta: rotation_table(config.rotating(i), like) for theta, i in layers.items()}


class Forward:
    """The forward over a source of weights.

    Decoder has them in one flat tensor, and CausalLM (causal_lm.py) as Parameters. With `recompute` a
    backward computes each layer again instead of keeping its activations. That decides no bit.
    `offload`: where the inputs of these layers lie until then, and what else no kernel reads.
    """

    weights: WeightSource
    _rope: Rotations  # of all positions

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics = COMPUTE,
        recompute: bool = False,
        offload: Offload = HERE,
    ):
        config.check_leaves(numerics.leaves.count)
        self.config, self.numerics, self.recompute, self.offload = config, numerics, recompute, offload

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
        """The rows of which lm_head makes the logits, [T, D], for ids [T] on any device.

        `hook` is called with the name and the output of every operation. Raises ValueError for an id outside
        the vocabulary, if the ids are on the CPU (see embedding).
        """
        c, stream = self.config, self._embed(ids, context, hook)
        rotations = self._rotations(context)
        for i in range(c.layers):
            stream = self._run_layer(i, stream, rotations, context, hook)
        if isinstance(context, NarrowingContext):
            context = context.narrowed
        x, residual = c.head.forward(self.weights.norm, Rows(*stream, context), c)
        hook(c.stream(c.layers), residual)
        hook("norm", x)
        return c.head.read_by_lm_head(x)

    def read(self, ids: torch.Tensor, context: KeepingContext, hook: Hook = no_hook) -> None:
        """As `hidden`, but only for what later tokens read, which `context` keeps.

        The forward ends where the last layer has mixed the rows.
        """
        stream, last = self._embed(ids, context, hook), self.config.layers - 1
        rotations = self._rotations(context)
        for i in range(last):
            stream = self._run_layer(i, stream, rotations, context, hook)
        layer = self._layer_run(last, rotations, hook)
        rows = Rows(*stream, context)
        with self.weights.layer(last) as w:
            for branch, summed in self.config.branches(last):
                if isinstance(branch.block, Mixer):
                    return branch.block.keep(w, branch.normed(w, rows, layer, summed).x, layer, context)
                rows = branch.forward(w, rows, layer, summed)

    def check_ids(self, ids: torch.Tensor) -> None:
        """Raise ValueError for ids of the host that are outside the vocabulary, before they go to a GPU.

        There the host would have to wait for the GPU. On a CPU `embedding` checks them.
        """
        if ids.device != self.device:
            check_ids(ids, self.config.vocab_size)

    def _rotations(self, context: Context) -> Rotations:
        """cos and sin of the positions."""
        positions = context.positions
        return {theta: (cos[positions], sin[positions]) for theta, (cos, sin) in self._rope.items()}

    def _layer_run(self, i: int, rotations: Rotations, hook: Hook) -> LayerRun:
        rotation = rotations[self.config.local_rope_thetas[i]]
        return LayerRun(i, self.config, self.numerics, rotation, hook)

    def _embed(self, ids: torch.Tensor, context: Context, hook: Hook) -> Stream:
        """The stream before the first layer, which has nothing to add."""
        self.check_ids(ids)
        if not ids.device == context.positions.device == self.device:
            (ids,) = upload_tables(self.device, context.tables, ids)
        residual = self.config.embedding.forward(
            self.weights.embed, ids, context.in_pass, self.numerics.leaves
        )
        hook(Embedding.name, residual)
        return None, residual

    def _run_layer(self, i: int, stream: Stream, *args: Any) -> Stream:
        """_layer, whose activations are kept for the backward, or computed again there."""
        if not (self.recompute and torch.is_grad_enabled()):
            return self._layer(i, stream, *args)

        def layer(x: torch.Tensor | None, residual: torch.Tensor) -> Stream:
            return self._layer(i, (x, residual), *args)

        with self.offload.keeping():  # it sees the tensors among the arguments, and none inside a tuple
            return checkpoint(layer, *stream, use_reentrant=False, preserve_rng_state=False)

    def _layer(self, i: int, stream: Stream, rotations: Rotations, context: Context, hook: Hook) -> Stream:
        """The stream after layer i, of whose weights the layer asks once."""
        with self.weights.layer(i) as w:
            return self._compute_layer(i, w, stream, rotations, context, hook)

    def _compute_layer(
        self, i: int, w: LayerWeights, stream: Stream, rotations: Rotations, context: Context, hook: Hook
    ) -> Stream:
        """The stream after layer i with the weights w."""
        layer = self._layer_run(i, rotations, hook)
        rows = Rows(*stream, context)
        for branch, summed in self.config.branches(i):
            rows = branch.forward(w, rows, layer, summed)
        return rows.x, rows.residual


class Decoder(Forward):
    """Weights in one flat tensor, and the forward over them.

    `flat` [layout.numel] holds the weights in the compute dtype. Raises ValueError on a device whose kernels
    do not compute what the config asks for.
    """

    def __init__(
        self,
        config: ModelConfig,
        flat: torch.Tensor,
        layout: Layout | None = None,
        numerics: Numerics = COMPUTE,
        recompute: bool = False,
        offload: Offload = HERE,
    ):
        super().__init__(config, numerics, recompute, offload)
        if on_triton(flat):
            config.refuse_on_triton()
        self.flat, self.layout, self._adapters = flat, layout or Layout(config), NONE_UNMERGED
        self.weights = FlatWeights(self.layout, flat)
        self._rope = rotation_tables(config, flat)

    @property
    def w(self) -> dict[str, torch.Tensor]:
        """All weights by name."""
        return self.weights.named

    def move_to(self, flat: torch.Tensor) -> None:
        """Copy the weights to `flat` [layout.numel] and compute with `flat` from now on.

        Views that were taken before still show the old memory.
        """
        self.flat = flat.copy_(self.flat.detach())
        self.weights = FlatWeights(self.layout, self.flat, self._adapters)

    def adapt(self, adapters: UnmergedAdapters) -> None:
        """Compute with these LoRA adapters beside the weights from now on. Their memory may change later."""
        self._adapters = adapters
        self.weights = FlatWeights(self.layout, self.flat, adapters)

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype in which a cache stores keys and values."""
        return self.numerics.cache_dtype(self.dtype)

    @property
    def value_head(self) -> torch.Tensor | None:
        return self.w.get(VALUE_HEAD)

    def matrices(self) -> list[torch.Tensor]:
        """The weights of the matrix products, each [N, K]."""
        return [w for name, w in self.w.items() if w.dim() == 2 and name != "embed"] + [
            self.lm_head
        ] * self.config.tied

    def packable(self) -> list[torch.Tensor]:
        """Those of `matrices` of which a packed copy is read: not of adapted ones (Weight.packable)."""
        unpackable = {self.w[name] for name in (*self.layout.unpackable, *self._adapters)}
        return [w for w in self.matrices() if w not in unpackable]

    def leaves_of_products(self) -> dict[torch.Tensor, int]:
        """By weight, the leaves in this rank of a product with it, where it has several."""
        leaves = self.numerics.leaves.mine
        return {self.w[name]: leaves for name in self.layout.cut_inputs} if leaves > 1 else {}
