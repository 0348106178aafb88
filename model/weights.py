"""All weights of a model in one flat tensor, with a named view for each.

One layout serves the compute weights, the fp32 master weights, the gradients and the optimizer's moments, so
that each elementwise pass of the optimizer is a few long operations, and a sum over all parameters has one
fixed order.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from ..verify.ledger import BLOCK
from .config import ModelConfig

# Views start at multiples of this many elements: 64 bytes in any dtype, so the matrix library sees the same
# alignment.
_ALIGN = 64
# The flat tensor's length is a multiple of this: the tile of the sums over all parameters.
FLAT_TILE = 4096


@dataclass(frozen=True)
class Entry:
    """One weight. `parts` are the checkpoint's tensors that lie in it one after another along axis 0."""

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


class Block(NamedTuple):
    """Elements [start, stop) of the flat tensor:

    a block of the checkpoint's tensor `name`, as the ledger hashes it.
    """

    name: str
    start: int
    stop: int


class Layout:
    """Names, shapes and offsets of a model's weights.

    q, k, v and gate, up are fused to one matrix each, as in vLLM.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self.entries: dict[str, Entry] = {}
        self.numel = 0
        self._add_all(config)
        self.numel += -self.numel % FLAT_TILE

    def _add(self, name: str, width: tuple[int, ...], *parts: tuple[str, int]) -> None:
        shape = (sum(rows for _, rows in parts), *width)
        entry = Entry(name, shape, self.numel, parts)
        self.entries[name] = entry
        self.numel += entry.numel + -entry.numel % _ALIGN

    def _add_all(self, c: ModelConfig) -> None:
        D, I, q, kv = c.hidden_size, c.intermediate_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
        self._add("embed", (D,), ("model.embed_tokens.weight", c.vocab_size))
        for i in range(c.layers):
            own, theirs = f"layers.{i}.", f"model.layers.{i}."
            attn = theirs + "self_attn."
            self._add(own + "input_norm", (), (theirs + "input_layernorm.weight", D))
            self._add(
                own + "qkv",
                (D,),
                *((f"{attn}{p}_proj.weight", n) for p, n in (("q", q), ("k", kv), ("v", kv))),
            )
            if c.qkv_bias:
                self._add(
                    own + "qkv_bias",
                    (),
                    *((f"{attn}{p}_proj.bias", n) for p, n in (("q", q), ("k", kv), ("v", kv))),
                )
            if c.qk_norm:
                self._add(own + "q_norm", (), (attn + "q_norm.weight", c.head_dim))
                self._add(own + "k_norm", (), (attn + "k_norm.weight", c.head_dim))
            self._add(own + "o", (q,), (attn + "o_proj.weight", D))
            if c.o_bias:
                self._add(own + "o_bias", (), (attn + "o_proj.bias", D))
            self._add(own + "post_norm", (), (theirs + "post_attention_layernorm.weight", D))
            self._add(
                own + "gate_up",
                (D,),
                (theirs + "mlp.gate_proj.weight", I),
                (theirs + "mlp.up_proj.weight", I),
            )
            self._add(own + "down", (I,), (theirs + "mlp.down_proj.weight", D))
        self._add("norm", (), ("model.norm.weight", D))
        if not c.tied:
            self._add("lm_head", (D,), ("lm_head.weight", c.vocab_size))

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A view of `flat` for each weight, by zerokl's name."""
        return {e.name: flat[e.offset : e.offset + e.numel].view(e.shape) for e in self.entries.values()}

    def checkpoint_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A view of `flat` for each tensor of a Hugging Face checkpoint, by its name there."""
        views = {}
        for name, whole in self.views(flat).items():
            parts = self.entries[name].parts
            views |= zip((part for part, _ in parts), whole.split([rows for _, rows in parts]), strict=True)
        return views

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of the checkpoint's tensors, in their order."""
        found = []
        for entry in self.entries.values():
            start, width = entry.offset, entry.numel // entry.shape[0]
            for name, rows in entry.parts:
                stop = start + rows * width
                found += [Block(name, at, min(at + BLOCK, stop)) for at in range(start, stop, BLOCK)]
                start = stop
        return found

    def cut(self, n: int) -> list[slice]:
        """n neighbouring slices of the flat tensor, of about one length, each of whole blocks; with few
        blocks some are empty.
        """
        starts = [*(block.start for block in self.blocks), self.numel]
        ends = [min(starts, key=lambda at: abs(at * n - k * self.numel)) for k in range(n + 1)]
        return [slice(a, b) for a, b in pairwise(ends)]

    def blocks_in(self, part: slice) -> list[Block]:
        """The blocks of a slice of `cut`, counted from its start."""
        return [
            Block(b.name, b.start - part.start, b.stop - part.start)
            for b in self.blocks
            if part.start <= b.start < part.stop
        ]


def fingerprint(layout: Layout, flat: torch.Tensor) -> str:
    """SHA-256 over name, dtype, shape and bytes of each weight, in the order of the checkpoint names."""
    digest = hashlib.sha256()
    for name, view in sorted(layout.checkpoint_views(flat).items()):
        digest.update(f"{name} {view.dtype} {tuple(view.shape)}\n".encode())
        digest.update(view.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
