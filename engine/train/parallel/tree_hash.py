"""The hash tree (verify/ledger.py) of a quantity that lies in flat tensors, one part for each weight.

The digests of the blocks are made where the tensors lie (kernels/block_digest.py). On a CPU other threads
help the calling thread. Only the digests go to the host.
"""

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import groupby

import numpy as np
import torch

from ....kernels.backend import on_triton
from ....kernels.block_digest import BLOCK, LANES, block_digests
from ....model.offload import SLICE
from ....model.weights import Block
from ....verify.ledger import Tree, tree_of

# Threads that hash beside the calling thread: numpy lets other threads run. The result does not depend on
# which thread hashes which block.
_HELPERS = min(8, os.cpu_count() or 1) - 1
# Blocks that a thread takes at a time.
_PORTION = 4


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, _HELPERS), thread_name_prefix="digests")


@lru_cache(maxsize=8)
def _bounds(blocks: tuple[Block, ...], device: torch.device) -> torch.Tensor:
    """The start and the end of each block, [B, 2] int64."""
    return torch.tensor([(b.start, b.stop) for b in blocks], dtype=torch.int64).view(-1, 2).to(device)


class _Leaves:
    """What is hashed of each weight, with room for the digests: dtype, length and digest of each block.

    The digests of all blocks go there by one assignment, so the host has work for each weight only.
    """

    def __init__(self, blocks: Sequence[Block], dtypes: Sequence[torch.dtype]):
        text, digest = bytearray(), bytes(8 * LANES)
        starts = np.empty((len(dtypes), len(blocks)), np.int64)
        self._parts: list[tuple[str, slice]] = []
        for name, members in groupby(enumerate(blocks), key=lambda member: member[1].name):
            begin = len(text)
            for i, block in members:
                for column, dtype in enumerate(dtypes):
                    text += b"%s %d " % (f"{dtype}".encode(), block.stop - block.start)
                    starts[column, i] = len(text)
                    text += digest
            self._parts.append((name, slice(begin, len(text))))
        self._text = np.frombuffer(text, np.uint8)
        self._places = starts[:, :, None] + np.arange(len(digest))  # of each byte of a digest

    def filled(self, digests: Sequence[np.ndarray]) -> list[tuple[str, bytes]]:
        """The name and the text of each weight. digests: of each tensor, [B, LANES] int64."""
        text = self._text.copy()
        text[self._places] = [x.astype("<i8", copy=False).view(np.uint8) for x in digests]
        raw = text.tobytes()
        return [(name, raw[part]) for name, part in self._parts]


@lru_cache(maxsize=8)
def _leaves(blocks: tuple[Block, ...], dtypes: tuple[torch.dtype, ...]) -> _Leaves:
    return _Leaves(blocks, dtypes)


def _brought_digests(x: torch.Tensor, bounds: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Of the blocks of a tensor beside `device`, some of which are on it at once."""
    digests = []
    for part in bounds.split(SLICE // BLOCK):
        first, end = part[0, 0].item(), part[-1, 1].item()
        digests.append(block_digests(x[first:end].to(device), (part - first).to(device)))
    return torch.cat(digests)


class Hashing:
    """Digests that have been begun. Nobody may change the tensors until `leaves` returns.

    blocks: of the tensors, with the name of the weight that each is a part of.
    tensors: the quantity is all of them together. Elements after the last block are ignored.
    device: that computes. Tensors beside a GPU come to it by slices.
    """

    def __init__(self, blocks: Sequence[Block], *tensors: torch.Tensor, device: torch.device | None = None):
        self._blocks, self._tensors = tuple(blocks), tensors
        self._digests, self._waiting, self._helpers = [], deque(), []
        for x in tensors:
            bounds = _bounds(self._blocks, x.device)
            if device is not None and device.type != x.device.type:
                self._digests.append(_brought_digests(x, bounds, device))
            elif on_triton(x):
                self._digests.append(block_digests(x, bounds))
            else:
                digests = torch.empty(len(bounds), LANES, dtype=torch.int64)
                self._digests.append(digests)
                self._waiting += zip(
                    [x] * len(bounds), bounds.split(_PORTION), digests.split(_PORTION), strict=False
                )
        if self._waiting:
            self._helpers = [_pool().submit(self._work) for _ in range(_HELPERS)]

    def _work(self) -> None:
        while True:
            try:
                x, bounds, digests = self._waiting.popleft()
            except IndexError:
                return
            digests.copy_(block_digests(x, bounds))

    def leaves(self) -> list[tuple[str, bytes]]:
        """The name of each weight, and what is hashed of its blocks here. The calling thread helps."""
        self._work()
        for helper in self._helpers:
            if not helper.cancel():  # the helper has begun
                helper.result()
        leaves = _leaves(self._blocks, tuple(x.dtype for x in self._tensors))
        return leaves.filled([digests.cpu().numpy() for digests in self._digests])


def hash_tree(blocks: Sequence[Block], *tensors: torch.Tensor) -> Tree:
    """The tree of a quantity. A leaf hashes the blocks that one weight has in each of the flat tensors."""
    return tree_of(Hashing(blocks, *tensors).leaves())
