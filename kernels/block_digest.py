"""Digests of blocks of a tensor, made where the tensor lies: only 16 bytes of a block go to the host.

    digest_l = sum over i of k_{l,i} w_i  mod 2^64          l = 0, 1

w_i is the i-th word of the block: the bits of element i, as an unsigned number of 16 or 32 bits. The keys
k_{l,i} are fixed 64-bit numbers, drawn by Philox. This is multilinear hashing (Carter & Wegman
1979; Lemire & Kaser, arXiv:1202.4961). Sums modulo 2^64 are associative, so no order of programs decides a
bit, and a CPU and a GPU have the same digest for the same bits.

Two different blocks of one length share a digest with a probability of at most 2^-66 for words of 32 bits,
and 2^-98 for words of 16 bits, over the choice of the keys. For a difference w_i - w'_i is divisible by 2^31
(2^15) at most, so the sums of a lane are equal with a probability of at most 2^-33 (2^-49). The keys are
public. So a digest finds faults, flipped bits and other orders, but it does not hold against somebody who
looks for a collision.

Shapes: x [n]; blocks [B, 2], the start and the end of each; digests [B, 2] int64.
"""

from functools import cache

import numpy as np
import torch

from .backend import on_triton
from .philox import Stream, philox

# Elements of a block at most; a key for each.
BLOCK = 1 << 16
LANES = 2
_WORDS = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}


@cache
def keys() -> np.ndarray:
    """The keys of both lanes, [LANES, BLOCK] uint64."""
    counter = np.zeros((BLOCK, 4), np.uint64)
    counter[:, 0] = np.arange(BLOCK)
    words = philox(counter, (0, int(Stream.DIGEST)))
    return np.ascontiguousarray((words[:, 0::2] << np.uint64(32) | words[:, 1::2]).T)


@cache
def keys_on(device: torch.device) -> torch.Tensor:
    """The keys on a device, [LANES, BLOCK] int64."""
    return torch.from_numpy(keys().view(np.int64)).to(device)


def block_digests_ref(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The reference of block_digests."""
    signed, unsigned = _WORDS[x.element_size()]
    words = x.detach().view(signed).numpy().view(unsigned)
    digests = np.zeros((len(blocks), LANES), np.uint64)
    for block, (start, end) in enumerate(blocks.tolist()):
        block_words = words[start:end].astype(np.uint64)
        np.einsum("li,i->l", keys()[:, : end - start], block_words, out=digests[block])
    return torch.from_numpy(digests.view(np.int64))


def block_digests(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The digest of each block, on the device of x. Nothing waits for a GPU.

    x [n], contiguous, of 2 or 4 bytes an element; blocks [B, 2] int64, on the same device, of at most BLOCK
    elements each -> [B, LANES] int64. Raises ValueError for another dtype or shape.
    """
    if x.element_size() not in _WORDS or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"block_digests: x ({x.dtype}, {tuple(x.shape)}) must be one contiguous line of "
            "elements of 2 or 4 bytes"
        )
    if on_triton(x):
        from .block_digest_triton import block_digests as block_digests_triton

        return block_digests_triton(x, blocks, keys_on(x.device))
    return block_digests_ref(x, blocks)
