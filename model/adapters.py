"""LoRA adapters (Hu et al., arXiv:2106.09685): W' = round(W + s B A), s = alpha / rank.

A and B are fp32. The merged weights W' (kernels/merge.py) are what sampler and trainer compute with, so both
are exact in every way in which they are exact without adapters. W, the base, never changes. The gradients of
A and B are summed in each pass, as those of weights are (kernels/low_rank.py).

Shapes: W, W' [N, K]; B [N, r]; A [r, K]. The decoder's q, k and v are one matrix, and gate and up are
one. The matrices of a layer's experts are two. Each part that has an adapter has one of its own, as in PEFT.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from ..files.bitwise import unequal
from ..kernels.grad import GradBuffer
from ..kernels.low_rank import AdapterBuffers, LowRank, LowRankBuffers
from ..kernels.merge import merge, swallowed_rows
from ..kernels.philox import Stream, uniform_range
from .config import ModelConfig
from .decoder import Decoder
from .lora import Lora, matrix_kinds
from .weights import Entry, FlatLayout, Layout, Shape

# In front of a module's name, PEFT writes this in its files.
PEFT_PREFIX = "base_model.model."


class Adapter(NamedTuple):
    """The adapter of one matrix of the checkpoint."""

    module: str  # the matrix's name in the checkpoint, without ".weight"
    weight: Entry  # of the decoder's weight, of which the matrix is the part `rows`
    rows: slice
    a: Entry
    b: Entry


def adapted_layout(config: ModelConfig, lora: Lora) -> Layout:
    """The layout of a model whose weights with adapters come first.

    The others are `frozen`. A matrix of which one part has an adapter is adapted as a whole.

    Raises ValueError for targets that are some of the matrices of one tensor.
    """
    layout = Layout(config)
    for entry in layout.entries.values():
        for part, _ in entry.parts:
            _refuse_a_part(config, part, lora)
    frozen = [e.name for e in layout.entries.values() if not any(_is_target(p, lora) for p, _ in e.parts)]
    return Layout(config, frozen)


def _refuse_a_part(config: ModelConfig, name: str, lora: Lora) -> None:
    """Raise ValueError where some of the matrices of a checkpoint's tensor have an adapter, and not all."""
    kinds = matrix_kinds(name)
    chosen = [kind for kind in kinds if kind in lora.targets]
    if chosen and len(chosen) < len(kinds):
        raise ValueError(
            f"lora: targets has {', '.join(chosen)}, and a {config.architecture} holds {', '.join(kinds)} as "
            f"one tensor ({name.split('.')[-2]}), which has one adapter; name all of them or none"
        )


def _is_target(name: str, lora: Lora) -> bool:
    """Whether the tensor `name` of a checkpoint has an adapter: all its matrices are targets."""
    kinds = matrix_kinds(name)
    return bool(kinds) and {*kinds} <= {*lora.targets}


class AdapterLayout(FlatLayout):
    """Names, shapes and offsets of A and B of each adapter, which are all trained. The names are PEFT's."""

    def __init__(self, model: Layout, lora: Lora):
        """model: see adapted_layout."""
        self.model, self.lora = model, lora
        adapted = [
            (name.removesuffix(".weight"), entry, slice(start, start + rows))
            for entry in model.trained
            for name, start, rows in _parts(entry)
            if _is_target(name, lora)
        ]
        shapes: dict[str, Shape] = {}
        for module, entry, rows in adapted:
            for letter, shape in (
                ("A", (lora.rank, entry.shape[1])),
                ("B", (rows.stop - rows.start, lora.rank)),
            ):
                name = f"{PEFT_PREFIX}{module}.lora_{letter}.weight"
                shapes[name] = shape, ((name, shape[0]),)
        super().__init__(shapes)
        entries = iter(self.entries.values())
        self.adapters = [Adapter(*place, next(entries), next(entries)) for place in adapted]

    def of_rank(self, ranks: int) -> "AdapterLayout":
        """The layout of the adapters of the part of the model that one of `ranks` has (Layout.of_rank)."""
        return AdapterLayout(self.model.of_rank(ranks), self.lora)

    def ranges_of_rank(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Where the elements of a rank's part lie in this layout: [start, stop) each, in their order.

        It has its columns of A where ranks share the weight's columns, and else its rows of B.
        """
        ranges = []
        for _, weight, rows, a, b in self.adapters:
            width = a.shape[1] // ranks
            if weight.name in self.model.cut_inputs:
                firsts = range(a.offset + rank * width, a.offset + a.numel, a.shape[1])
                ranges += [(first, first + width) for first in firsts] + [(b.offset, b.offset + b.numel)]
                continue
            ranges.append((a.offset, a.offset + a.numel))
            end = 0
            for part in self.model.shared_rows(weight.name):
                start, end = end, end + part
                if rows.start <= start < rows.stop:
                    n = part * b.shape[1] // ranks
                    first = b.offset + (start - rows.start) * b.shape[1] + rank * n
                    ranges.append((first, first + n))
        return ranges


def _parts(entry: Entry) -> Iterator[tuple[str, int, int]]:
    """The name, the first row and the rows of each tensor of the checkpoint in a weight."""
    start = 0
    for name, rows in entry.parts:
        yield name, start, rows
        start += rows


def first_adapters(layout: AdapterLayout, seed: int) -> torch.Tensor:
    """The adapters before the first step, [layout.numel] fp32: B is zero, so W' is the rounded base.

    A is uniform in -1 / sqrt(K) to 1 / sqrt(K), as in PEFT: Kaiming's bound sqrt(6 / ((1 + 5) K)) of
    torch.nn.init.kaiming_uniform_ with a = sqrt(5). Each number is a function of the seed, the place of its
    matrix among the tensors of the model, and its own place in A. The other targets do not change it.
    """
    flat = torch.zeros(layout.numel)
    tensors = [name for entry in Layout(layout.model.config).entries.values() for name, _ in entry.parts]
    place = {name.removesuffix(".weight"): i for i, name in enumerate(tensors)}
    for module, *_, a, _ in layout.adapters:
        u = uniform_range(a.numel, seed, Stream.LORA, place[module])
        bound = 1.0 / math.sqrt(a.shape[1])
        flat[a.offset : a.offset + a.numel] = torch.from_numpy(((2.0 * u - 1.0) * bound).astype(np.float32))
    return flat


class Merged(NamedTuple):
    """One matrix with its adapter: the operands of kernels/merge.py, on one device."""

    layer: int
    w_new: torch.Tensor  # [N, K], where the merged matrix lies
    w: torch.Tensor  # [N, K]
    b: torch.Tensor
    a: torch.Tensor
    scale: float

    def swallowed_rows(self) -> np.ndarray:
        """What merge.swallowed_rows gives of it, [N, 2] fp64."""
        return swallowed_rows(*self[1:]).double().cpu().numpy()


def matrices_with_adapters(
    layout: AdapterLayout, adapters: torch.Tensor, base: torch.Tensor, merged: torch.Tensor
) -> Iterator[Merged]:
    """Each matrix that has an adapter.

    adapters: [layout.numel] fp32. base and merged: flat as layout.model; its trained part is enough.
    """
    for _, weight, rows, a, b in layout.adapters:
        w_new, w = (_view(flat, weight)[rows] for flat in (merged, base))
        factors = _view(adapters, b), _view(adapters, a)
        yield Merged(layer_of(weight), w_new, w.to(w_new.device), *factors, layout.lora.scale)


@torch.no_grad()
def merge_all(
    layout: AdapterLayout, adapters: torch.Tensor, base: torch.Tensor, merged: torch.Tensor
) -> None:
    """Write each matrix that has an adapter, with the adapter merged in, to its place in `merged`.

    The arguments are those of matrices_with_adapters.
    """
    for matrix in matrices_with_adapters(layout, adapters, base, merged):
        merge(*matrix[1:])


def layer_of(weight: Entry) -> int:
    """The layer of a weight that can have an adapter, by its name."""
    return int(weight.name.split(".")[1])


def low_rank_by_weight(layout: AdapterLayout, adapters: torch.Tensor) -> dict[str, tuple[LowRank, ...]]:
    """The adapters of each weight that has some, by its name, as views of `adapters` [layout.numel] fp32."""
    by_weight: dict[str, tuple[LowRank, ...]] = {}
    for _, weight, rows, a, b in layout.adapters:
        adapter = LowRank(rows, _view(adapters, b), _view(adapters, a), layout.lora.scale)
        by_weight[weight.name] = (*by_weight.get(weight.name, ()), adapter)
    return by_weight


def adapter_buffers(
    layout: AdapterLayout,
    adapters: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    sums: Mapping[str, GradBuffer],
) -> dict[torch.Tensor, LowRankBuffers]:
    """As adapter_buffers_by_name, by the weight. weights: those that a pass computes with, by name."""
    by_name = adapter_buffers_by_name(layout, adapters, sums)
    return {weights[name]: buffers for name, buffers in by_name.items()}


def adapter_buffers_by_name(
    layout: AdapterLayout, adapters: torch.Tensor, sums: Mapping[str, GradBuffer]
) -> dict[str, LowRankBuffers]:
    """For each weight that has adapters, where a pass adds up their gradients.

    adapters: [layout.numel] fp32, as the weights were merged with. sums: of each A and B, by name.
    """
    where = iter((sums[adapter.b.name], sums[adapter.a.name]) for adapter in layout.adapters)
    return {
        name: LowRankBuffers(tuple(AdapterBuffers(*adapter, *next(where)) for adapter in low_rank))
        for name, low_rank in low_rank_by_weight(layout, adapters).items()
    }


class Adapters:
    """The adapters of a decoder, and the base that they belong to. Both are whole in every rank.

    flat: A and B, [layout.numel] fp32. Whoever changes them calls `merge`, where they are merged.
    base: the adapted weights in the checkpoint's dtype, which holds them exactly, on the decoder's device or
    beside it (Decoder.offload). The other weights of the base lie in the same dtype on the host: no step
    computes with them.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        flat: torch.Tensor,
        weights: torch.Tensor,
        decoder: Decoder,
        base: torch.dtype,
    ):
        """weights: the base, [layout.model.numel] fp32. base: a dtype that holds it exactly.

        The decoder's weights are merged at once; where adapters are not merged (Lora.merge), the decoder
        computes with both.
        """
        self.layout, self.decoder = layout, decoder
        self.flat = flat.to(decoder.device, copy=True)
        adapted, rest = weights[: layout.model.trained_numel], weights[layout.model.trained_numel :]
        self._adapted = decoder.offload.copied(adapted, decoder.device, base)
        self._rest = rest.to("cpu", base, copy=True)
        self._bring()

    def move_to(self, flat: torch.Tensor) -> None:
        """Copy A and B to `flat` [layout.numel] fp32, which they are from now on."""
        self.flat = flat.copy_(self.flat)
        self._bring()

    def _bring(self) -> None:
        """Let the decoder compute with A and B where they lie now."""
        if self.layout.lora.merge:
            self.merge()
        else:
            self.decoder.adapt(low_rank_by_weight(self.layout, self.flat))

    @torch.no_grad()
    def merge(self) -> int:
        """Compute the decoder's weights again, from the base and the adapters as they are now.

        Returns how many of them have other bits than before.
        """
        moved = []
        for matrix in self._matrices():
            before = matrix.w_new.clone()
            merge(*matrix[1:])
            moved.append(unequal(before, matrix.w_new).sum())
        return int(torch.stack(moved).sum())

    def swallowed(self) -> list[tuple[int, np.ndarray]]:
        """What the rounding swallows of each adapter: its layer and [N, 2] (merge.swallowed_rows)."""
        return [(matrix.layer, matrix.swallowed_rows()) for matrix in self._matrices()]

    def _matrices(self) -> Iterator[Merged]:
        return matrices_with_adapters(self.layout, self.flat, self._adapted, self.decoder.flat.detach())

    def merged(self) -> torch.Tensor:
        """The whole model with its adapters merged in, in fp32: [layout.model.numel].

        Rounded to the compute dtype, it has the bits of the decoder's weights.
        """
        adapted = self._adapted.to(self.decoder.device, torch.float32)
        model = torch.cat([adapted, self._rest.to(adapted.device, torch.float32)])
        merge_all(self.layout, self.flat, self._adapted, model)
        return model

    def base_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The name in the checkpoint and the fp32 values of each weight of the base, on the host."""
        model = self.layout.model
        for name, view in model.trained_views(self._adapted).items():
            yield name, view.to("cpu", torch.float32)
        for name, view in model.frozen_views(self._rest).items():
            yield name, view.float()


def _view(flat: torch.Tensor, entry: Entry) -> torch.Tensor:
    return flat[entry.offset : entry.offset + entry.numel].view(entry.shape)
