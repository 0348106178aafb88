"""All weights of a model in one flat tensor, with a named view for each.

The compute weights, the fp32 master weights, the gradients and the optimizer's moments have one layout. So
each elementwise pass of the optimizer is a few long operations, and a sum over all parameters has one fixed
order.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from ..kernels.block_digest import BLOCK
from ..kernels.linear import Adapted
from ..kernels.low_rank import LowRank
from .blocks.block import LayerWeights, Weight
from .buffers import all_as_numbers
from .config import ModelConfig

# Views start at multiples of this many elements: at least 64 bytes in any dtype. So the matrix library always
# sees the same alignment.
_ALIGN = 64
# The flat tensor's length is a multiple of this: the tile of the sums over all parameters.
FLAT_TILE = 4096
# The name of a critic's head among the weights, and in the ledger and a run's checkpoints.
VALUE_HEAD, VALUE_HEAD_TENSOR = "value_head", "value_head.weight"


@dataclass(frozen=True)
class Entry:
    """One weight. It holds the checkpoint's tensors `parts`, one after another along axis 0."""

    name: str
    shape: tuple[int, ...]
    offset: int
    parts: tuple[tuple[str, int], ...]  # (checkpoint name, rows)

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.shape:
            n *= d
        return n


# The shape of a weight, and the checkpoint's tensors that it holds, each with its rows.
Shape = tuple[tuple[int, ...], tuple[tuple[str, int], ...]]


class Block(NamedTuple):
    """A block of the checkpoint's tensor `name`, as the ledger hashes it.

    It holds the elements [start, stop) of the flat tensor.
    """

    name: str
    start: int
    stop: int


class FlatLayout:
    """Names, shapes and offsets of weights in one flat tensor, trained ones first, then frozen ones.

    buffers: the tensors of the checkpoint whose numbers are held as bytes (buffers.py). They are frozen.

    The gradient, the master weights, the optimizer's state, the norm and the ledger's hashes are of the first
    `trained_numel` elements. Without frozen weights these are all.
    """

    buffers: Collection[str] = frozenset()

    def __init__(self, shapes: Mapping[str, Shape], frozen: Collection[str] = ()):
        """shapes: of each weight, by its name, in the order of the flat tensor. frozen: names of weights.

        Raises ValueError for a frozen name of no weight, and where nothing is trained.
        """
        self.frozen = frozenset(frozen)
        self.entries: dict[str, Entry] = {}
        unknown = sorted(self.frozen - shapes.keys())
        trained = {name: shape for name, shape in shapes.items() if name not in self.frozen}
        if unknown or not trained:
            what = f"{unknown[0]} is no weight of the model" if unknown else "no weight is left to train"
            raise ValueError(f"frozen ({', '.join(sorted(self.frozen))}): {what}")
        self.trained_numel = self._place(trained, 0)
        rest = {name: shape for name, shape in shapes.items() if name in self.frozen}
        self.numel = self._place(rest, self.trained_numel)

    def _place(self, shapes: Mapping[str, Shape], offset: int) -> int:
        """Lay out these weights from `offset` on. Returns where the next ones can begin."""
        for name, (shape, parts) in shapes.items():
            entry = self.entries[name] = Entry(name, shape, offset, parts)
            offset += entry.numel + -entry.numel % _ALIGN
        return offset + -offset % FLAT_TILE

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A view of `flat` for each weight, by its name in zerokl."""
        return {e.name: flat[e.offset : e.offset + e.numel].view(e.shape) for e in self.entries.values()}

    def checkpoint_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A view of `flat` for each tensor of a Hugging Face checkpoint, by its name in the checkpoint."""
        return _part_views(self.entries.values(), flat, 0)

    def beside_checkpoint(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A view of `flat` [numel], by name, for what is trained and is no tensor of the checkpoint."""
        return {}

    def trained_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A view of `flat` [trained_numel] for each tensor of the checkpoint that is trained."""
        return _part_views(self.trained, flat, 0)

    def frozen_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A view of `flat` [numel - trained_numel] for each tensor of the checkpoint that is frozen."""
        frozen = (entry for name, entry in self.entries.items() if name in self.frozen)
        return _part_views(frozen, flat, self.trained_numel)

    @property
    def trained(self) -> list[Entry]:
        """The weights that are trained, in the order of the flat tensor."""
        return [entry for name, entry in self.entries.items() if name not in self.frozen]

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of the trained tensors of the checkpoint, in the order of the flat tensor."""
        blocks = []
        for entry in self.trained:
            start, width = entry.offset, entry.numel // entry.shape[0]
            for name, rows in entry.parts:
                stop = start + rows * width
                blocks += [Block(name, i, min(i + BLOCK, stop)) for i in range(start, stop, BLOCK)]
                start = stop
        return blocks

    def cut(self, n: int) -> list[slice]:
        """n neighbouring slices of the trained part, of about the same length, each of whole blocks.

        With few blocks some slices are empty.
        """
        numel = self.trained_numel
        starts = [*(block.start for block in self.blocks), numel]
        ends = [min(starts, key=lambda start: abs(start * n - k * numel)) for k in range(n + 1)]
        return [slice(a, b) for a, b in pairwise(ends)]

    def blocks_in(self, part: slice) -> list[Block]:
        """The blocks of a slice of `cut`. Their elements count from the start of the slice."""
        return [
            Block(b.name, b.start - part.start, b.stop - part.start)
            for b in self.blocks
            if part.start <= b.start < part.stop
        ]


class Layout(FlatLayout):
    """The weights of a model, which are those of its blocks."""

    def __init__(self, config: ModelConfig, frozen: Collection[str] = (), value_head: bool = False):
        """frozen: names of weights that are not trained; buffers never are. With tied embeddings, embed is
        lm_head too.

        value_head: whether a critic's head is trained beside the model (kernels/value_head.py). It is the
        last of the trained weights, a vector, and no tensor of the model's checkpoint.

        Raises ValueError (see FlatLayout).
        """
        self.config, self.value_head = config, value_head
        # A tensor that a checkpoint may hold in place of a weight's parts -> the weight, and its shape there.
        self.fused: dict[str, tuple[str, tuple[int, ...]]] = {}
        shapes: dict[str, Shape] = {}
        self.unpackable: set[str] = set()
        self.cut_inputs: set[str] = set()  # whose products ranks cut along K (Weight.shared_columns)
        self._weights: dict[str, Weight] = {}
        buffers: set[str] = set()
        frozen = {*frozen}
        for prefix, weight in _weights(config):
            hf = f"model.{prefix}" if prefix else ""
            parts = tuple((hf + part, rows) for part, rows in weight.parts)
            self._weights[prefix + weight.name] = weight
            shapes[prefix + weight.name] = (sum(rows for _, rows in parts), *weight.width), parts
            if weight.together:
                name, shape = weight.together
                self.fused[hf + name] = prefix + weight.name, shape
            if not weight.packable:
                self.unpackable.add(prefix + weight.name)
            if weight.shared_columns:
                self.cut_inputs.add(prefix + weight.name)
            if weight.is_buffer:
                buffers |= {name for name, _ in parts}
                frozen.add(prefix + weight.name)
        self.buffers = frozenset(buffers)
        if value_head:
            shapes[VALUE_HEAD] = (config.hidden_size,), ((VALUE_HEAD_TENSOR, config.hidden_size),)
        super().__init__(shapes, frozen)

    def of_rank(self, ranks: int) -> "Layout":
        """The layout of the part that one of `ranks` has, with the same weights trained."""
        return Layout(self.config.of_rank(ranks), self.frozen, self.value_head)

    def ranges_of_rank(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Where the elements of a rank's part lie in this layout: [start, stop) each, in their order."""
        ranges = []
        for entry in self.entries.values():
            weight, start = self._weights.get(entry.name), entry.offset
            if weight is not None and weight.shared_columns:
                width = entry.shape[1] // ranks
                firsts = range(start + rank * width, start + entry.numel, entry.shape[1])
                ranges += [(first, first + width) for first in firsts]
            elif weight is not None and weight.shared_rows:
                for rows in weight.shared_rows:
                    n = rows * entry.numel // entry.shape[0] // ranks
                    ranges.append((start + rank * n, start + (rank + 1) * n))
                    start += n * ranks
            else:
                ranges.append((start, start + entry.numel))
        return ranges

    def of_expert_rank(self, ranks: int) -> "Layout":
        """The layout of what one of `ranks` has that share experts: its own, and all other weights."""
        config = replace(self.config, expert_ranks=ranks)
        return Layout(config, self.frozen, self.value_head)

    def ranges_of_expert_rank(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """As ranges_of_rank, of one of `ranks` that share experts."""
        ranges = []
        for entry in self.entries.values():
            weight, (a, b) = self._weights.get(entry.name), (0, entry.numel)
            if weight is not None and weight.by_expert:
                a, b = (i * entry.numel // ranks for i in (rank, rank + 1))
            ranges.append((entry.offset + a, entry.offset + b))
        return ranges

    def shared_rows(self, name: str) -> tuple[int, ...]:
        """The rows of the parts of a weight of each of which a rank has an equal piece."""
        return self._weights[name].shared_rows

    def checkpoint_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model's tensors, without a critic's head."""
        views = super().checkpoint_views(flat)
        views.pop(VALUE_HEAD_TENSOR, None)
        return views

    def stored_tensors(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model's tensors as files and other engines have them: numbers in place of a buffer's bytes."""
        return dict(all_as_numbers(self.checkpoint_views(flat).items(), self.buffers))

    def beside_checkpoint(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {VALUE_HEAD_TENSOR: self.views(flat)[VALUE_HEAD]} if self.value_head else {}


def _weights(config: ModelConfig) -> Iterator[tuple[str, Weight]]:
    """All weights in their order in the flat tensor, each with the prefix of its layer ("" in no layer)."""
    yield from (("", weight) for weight in config.embedding.weights(config))
    for i, layer in enumerate(config.blocks):
        yield from ((f"layers.{i}.", weight) for branch in layer for weight in branch.weights(config))
    yield from (("", weight) for weight in config.head.weights(config))


def _part_views(entries: Iterable[Entry], flat: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
    """A view for each tensor of the checkpoint that the entries hold. `flat` begins at offset `start`."""
    views = {}
    for e in entries:
        view = flat[e.offset - start : e.offset - start + e.numel].view(e.shape)
        views |= zip((part for part, _ in e.parts), view.split([rows for _, rows in e.parts]), strict=True)
    return views


class WeightSource(Protocol):
    """Where a forward finds its weights.

    embed and lm_head [V, D], norm [D]: the weights outside of layers.
    """

    embed: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor

    def layer(self, i: int) -> AbstractContextManager[LayerWeights]:
        """The weights of layer i, by their names in the layer. They may be read inside the context only."""
        ...


# By the name of a weight, LoRA's adapters that are not merged into it (adapters.py).
UnmergedAdapters = Mapping[str, tuple[LowRank, ...]]
NONE_UNMERGED: UnmergedAdapters = MappingProxyType({})


class FlatWeights(WeightSource):
    """The weights as views of one flat tensor [layout.numel]: a source that has all of them at any time.

    With tied embeddings lm_head is a second tensor over the embedding's memory. So its gradient has a buffer
    of its own. In one buffer, the order of the two uses would depend on the micro-batch size.
    """

    def __init__(self, layout: Layout, flat: torch.Tensor, adapters: UnmergedAdapters = NONE_UNMERGED):
        self.named = {
            name: view.requires_grad_(name not in layout.frozen)
            for name, view in layout.views(flat.detach()).items()
        }
        self._layers: list[dict[str, torch.Tensor | Adapted]] = [{} for _ in range(layout.config.layers)]
        for name, view in self.named.items():
            if name.startswith("layers."):
                _, i, name_in_layer = name.split(".", 2)
                low_rank = adapters.get(name)
                self._layers[int(i)][name_in_layer] = Adapted(view, low_rank) if low_rank else view
        embed = self.embed = self.named["embed"]
        self.norm = self.named["norm"]
        tied = layout.config.tied
        self.lm_head = embed.detach().requires_grad_(embed.requires_grad) if tied else self.named["lm_head"]

    def layer(self, i: int) -> AbstractContextManager[LayerWeights]:
        return nullcontext(self._layers[i])


def fingerprint(layout: FlatLayout, flat: torch.Tensor) -> str:
    """SHA-256 over name, dtype, shape and bytes of each weight, in the order of the checkpoint names."""
    digest = hashlib.sha256()
    for name, view in sorted(layout.checkpoint_views(flat).items()):
        digest.update(f"{name} {view.dtype} {tuple(view.shape)}\n".encode())
        digest.update(view.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
