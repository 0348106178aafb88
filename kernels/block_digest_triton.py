"""Triton kernel of block_digest.py: one program for each block, integers only."""

import torch
import triton
import triton.language as tl

from .launch import launch

# Elements of one turn of the loop. It decides no bit: the sums are associative.
TILE, WARPS = 2048, 8


@triton.jit(do_not_specialize_on_alignment=["x_ptr"])
def _block_digests(x_ptr, key_ptr, block_ptr, digest_ptr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    start, end = tl.load(block_ptr + 2 * block), tl.load(block_ptr + 2 * block + 1)
    i = tl.arange(0, TILE)
    first, second = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    for begin in range(0, end - start, TILE):
        mask = begin + i < end - start
        word = tl.load(x_ptr + start + begin + i, mask=mask, other=0)
        word = word.to(tl.uint32 if word.dtype == tl.int32 else tl.uint16, bitcast=True).to(tl.int64)
        first += word * tl.load(key_ptr + begin + i, mask=mask, other=0)
        second += word * tl.load(key_ptr + BLOCK + begin + i, mask=mask, other=0)
    tl.store(digest_ptr + 2 * block, tl.sum(first))
    tl.store(digest_ptr + 2 * block + 1, tl.sum(second))


def block_digests(x: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The digests of block_digest.block_digests. keys [2, elements of a block at most] int64."""
    digests = torch.empty(len(blocks), len(keys), dtype=torch.int64, device=x.device)
    words = x.detach().view(torch.int16 if x.element_size() == 2 else torch.int32)
    if len(blocks):
        launch(
            _block_digests,
            (len(blocks),),
            words,
            keys,
            blocks,
            digests,
            BLOCK=keys.shape[1],
            TILE=TILE,
            num_warps=WARPS,
        )
    return digests
