"""The hash tree (verify/ledger.py) of a quantity that lies in flat tensors, one part for each weight.

The digests of the blocks are made where the tensors lie (kernels/block_digest.py). On a CPU other threads
help the calling thread. Only the digests go to the host.
"""

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache

import torch

from ...kernels.backend import on_triton
from ...kernels.block_digest import LANES, block_digests
from ...model.weights import Block
from ...verify.ledger import Tree, tree_of

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


@lru_cache(maxsize=8)
def _headers(blocks: tuple[Block, ...], dtype: torch.dtype) -> list[bytes]:
    """What is hashed before each block's digest: dtype and length."""
    return [b"%s %d " % (f"{dtype}".encode(), b.stop - b.start) for b in blocks]


class Hashing:
    """Digests that have been begun. Nobody may change the tensors until `digests` returns.

    blocks: of the tensors, with the name of the weight that each is a part of.
    tensors: the quantity is all of them together. Elements after the last block are ignored.
    """

    def __init__(self, blocks: Sequence[Block], *tensors: torch.Tensor):
        self._blocks, self._tensors = tuple(blocks), tensors
        self._digests, self._waiting, self._helpers = [], deque(), []
        for x in tensors:
            bounds = _bounds(self._blocks, x.device)
            if on_triton(x):
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

    def digests(self) -> list[tuple[str, bytes]]:
        """The name of the weight, and dtype, length and digest of each block. The calling thread helps."""
        self._work()
        for helper in self._helpers:
            if not helper.cancel():  # the helper has begun
                helper.result()
        # A slice of all bytes costs less than bytes of a row of numpy's.
        size, columns = 8 * LANES, []
        for x, digests in zip(self._tensors, self._digests, strict=True):
            raw = digests.cpu().numpy().astype("<i8", copy=False).tobytes()
            starts, headers = range(0, len(raw), size), _headers(self._blocks, x.dtype)
            columns.append([head + raw[i : i + size] for head, i in zip(headers, starts, strict=True)])
        names = (block.name for block in self._blocks)
        return list(zip(names, map(b"".join, zip(*columns, strict=True)), strict=True))


def hash_tree(blocks: Sequence[Block], *tensors: torch.Tensor) -> Tree:
    """The tree of a quantity. A leaf hashes the blocks that one weight has in each of the flat tensors."""
    return tree_of(Hashing(blocks, *tensors).digests())
