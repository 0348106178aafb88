"""Weights that are Parameters of a module, by Hugging Face's names.

The decoder computes with fused weights (weights.Layout): q, k and v are one matrix. Where the Parameters of a
fused weight lie side by side in one memory, it is a view of them. Otherwise it is a copy, which exists only
while its layer computes, forward or backward.

A layer's gradients are summed in fp32 in buffers that exist while the layer's backward runs. Its beginning
hands them to the Parameters, unrounded where a Parameter's grad_dtype is fp32. In the autograd graph:

    x -> _Begin -> the operations of the layer -> _End -> y

The backward of _End is the first of the layer: it makes the copies and the buffers. That of _Begin is the
last.
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import nn

from ..kernels.grad import GradBuffer
from ..kernels.linear import Adapted
from ..kernels.low_rank import LowRankBuffers
from ..kernels.shared_rows import ALL_ROWS, SharedRows
from .blocks.block import LayerWeights
from .weights import VALUE_HEAD, Layout, UnmergedAdapters, WeightSource

LayerBuffers = MutableMapping[torch.Tensor, GradBuffer | LowRankBuffers]


class ParameterWeights(WeightSource):
    """The Parameters of `module`, looked up at each use: FSDP has others in their place while it computes.

    adapters: LoRA's, that are not merged into the Parameters.
    """

    def __init__(self, module: nn.Module, layout: Layout, adapters: UnmergedAdapters):
        self._adapters = adapters
        self._layers: list[dict[str, list[tuple[nn.Module, str]]]] = [{} for _ in range(layout.config.layers)]
        self._outside: dict[str, tuple[nn.Module, str]] = {}
        for entry in layout.entries.values():
            places = []
            for name, _ in entry.parts:
                path, _, attribute = name.rpartition(".")
                places.append((module.get_submodule(path), attribute))
            if entry.name.startswith("layers."):
                _, i, name_in_layer = entry.name.split(".", 2)
                self._layers[int(i)][name_in_layer] = places
            else:
                self._outside[entry.name] = places[0]

    def _parameter(self, name: str) -> torch.Tensor:
        return getattr(*self._outside[name])

    @property
    def embed(self) -> torch.Tensor:
        return self._parameter("embed")

    @property
    def norm(self) -> torch.Tensor:
        return self._parameter("norm")

    @property
    def lm_head(self) -> torch.Tensor:
        """Tied, it is the embedding: autograd adds the gradients of the two uses."""
        return self._parameter("lm_head" if "lm_head" in self._outside else "embed")

    @property
    def value_head(self) -> torch.Tensor | None:
        """A critic's head, [D]; None where the layout has none."""
        return self._parameter(VALUE_HEAD) if VALUE_HEAD in self._outside else None

    def outside(self) -> list[torch.Tensor]:
        """The Parameters of no layer."""
        return [getattr(*place) for place in self._outside.values()]

    def parts(self, i: int) -> dict[str, list[torch.Tensor]]:
        """The Parameters of layer i, by the fused weight that they make up."""
        return {name: [getattr(*place) for place in places] for name, places in self._layers[i].items()}

    @contextmanager
    def layer(self, i: int) -> Iterator[LayerWeights]:
        """The weights of layer i, without gradients."""
        yield self.adapted(i, {name: _fused(parts)[0] for name, parts in self.parts(i).items()})

    def adapted(self, i: int, fused: Mapping[str, torch.Tensor]) -> LayerWeights:
        """The fused weights of layer i, and with them the adapters that are not merged."""
        low_rank = {name: self._adapters.get(f"layers.{i}.{name}") for name in fused}
        return {name: Adapted(w, low_rank[name]) if low_rank[name] else w for name, w in fused.items()}


class LayerCall:
    """The weights of one call of a layer, and their gradients while its backward runs.

    tensors: the fused weights by their names in the layer. buffers: those of the pass, to which the layer's
    are added for the time of its backward. dtypes: of weights that compute in another one than their
    Parameters'; None is theirs. adapters: of weights that LoRA adapts, where the gradients of A and B are
    summed in place of the weight's own. shared: the ranks that share the rows (Pass.shared).
    """

    def __init__(
        self,
        parts: dict[str, list[torch.Tensor]],
        buffers: LayerBuffers,
        dtypes: Mapping[str, torch.dtype | None] = MappingProxyType({}),
        adapters: Mapping[str, LowRankBuffers] = MappingProxyType({}),
        shared: SharedRows = ALL_ROWS,
    ):
        self._parts, self._buffers, self._adapters, self._shared = parts, buffers, adapters, shared
        self._copies: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        for name, tensors in parts.items():
            weight, is_copy = _fused(tensors)
            dtype = dtypes.get(name)
            if dtype not in (None, weight.dtype):
                weight, is_copy = weight.to(dtype), True
            if is_copy:
                self._copies.append((weight, tensors))
            has_gradient = name in adapters or any(p.requires_grad for p in tensors)
            self.tensors[name] = weight.requires_grad_(has_gradient)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All of the layer, in the order of their gradients."""
        return [p for tensors in self._parts.values() for p in tensors]

    def begin(
        self, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The inputs of the layer's operations."""
        return _Begin.apply(self, x, residual, *self.parameters)

    def end(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs of the layer's operations."""
        self._free_copies()
        return _End.apply(self, x, residual)

    def prepare(self) -> None:
        """Before the backward of the layer's operations."""
        for weight, parts in self._copies:
            weight.untyped_storage().resize_(weight.numel() * weight.element_size())
            torch.cat([p.detach() for p in parts], out=weight.detach())
        for name, weight in self.tensors.items():
            if weight.requires_grad:
                own_part = self._shared.mine(weight)
                self._buffers[weight] = self._adapters.get(name) or GradBuffer.like(own_part)

    def gradients(self) -> list[torch.Tensor | None]:
        """After it: the gradient of each of `parameters`. Copies and buffers are freed."""
        self._free_copies()
        gradients: list[torch.Tensor | None] = []
        for name, parts in self._parts.items():
            weight = self.tensors[name]
            assert weight.grad is None, "a gradient that missed its buffer"
            buffer = self._buffers.pop(weight, None)
            if not isinstance(buffer, GradBuffer):
                gradients += [None] * len(parts)
                continue
            (sums,) = buffer.zeroed([0])
            rows = self._shared.among_zeros(sums).split([len(p) for p in parts])
            gradients += [g.to(p.grad_dtype or g.dtype) for g, p in zip(rows, parts, strict=True)]
        return gradients

    def _free_copies(self) -> None:
        for weight, _ in self._copies:
            weight.untyped_storage().resize_(0)


class _Begin(torch.autograd.Function):
    """The identity. Its backward has the gradients of the layer's Parameters."""

    @staticmethod
    def forward(ctx, call, x, residual, *parameters):
        ctx.call = call
        return None if x is None else x.view_as(x), residual.view_as(residual)

    @staticmethod
    def backward(ctx, dx, dresidual):
        wanted = ctx.needs_input_grad[3:]
        gradients = ctx.call.gradients()
        has_x = ctx.needs_input_grad[1]
        gradients_wanted = (g if w else None for g, w in zip(gradients, wanted, strict=True))
        return None, dx if has_x else None, dresidual, *gradients_wanted


class _End(torch.autograd.Function):
    """The identity. Its backward prepares that of the layer."""

    @staticmethod
    def forward(ctx, call, x, residual):
        ctx.call = call
        return x.data, residual.data  # no views: FSDP warns of outputs that are

    @staticmethod
    def backward(ctx, dx, dresidual):
        ctx.call.prepare()
        return None, dx, dresidual


def keep_sums(parameters: Sequence[torch.Tensor]) -> None:
    """Let the gradients of these Parameters be fp32, as they are summed; not where there is one already."""
    for p in parameters:
        wanted = torch.float64 if p.dtype == torch.float64 else torch.float32
        if p.requires_grad and p.grad is None and p.grad_dtype != wanted:
            p.grad_dtype = wanted


def _fused(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """All parts joined along axis 0, and whether that is a copy: a view where they lie side by side."""
    parts = [p.detach() for p in parts]
    first = parts[0]
    if len(parts) == 1:
        return first, False
    storage = first.untyped_storage().data_ptr()
    in_one = all(p.is_contiguous() and p.untyped_storage().data_ptr() == storage for p in parts)
    if not in_one or any(b.storage_offset() != a.storage_offset() + a.numel() for a, b in pairwise(parts)):
        return torch.cat(parts), True
    shape = sum(map(len, parts)), *first.shape[1:]
    return first.as_strided(shape, first.stride(), first.storage_offset()), False
