"""MXFP4 weights of a checkpoint, as numbers (OCP Microscaling Formats, version 1.0, sections 5.2 and 5.3.3).

32 values of a row share a scale. A value is one of 8 magnitudes (e2m1) with a sign, in 4 bits; the lower half
of a byte comes first. A scale is a byte s (e8m0): 2^(s - 127); 255 is NaN.

    x = value 2^(s - 127)

bf16 holds x exactly up to s = 252: a value has two significant bits, the smallest x is 2^-128, where bf16
counts in steps of 2^-133, and the largest is 1.5 2^127. From s = 253 on the largest values reach 2^128, which
no dtype of a checkpoint holds. They come out infinite, and with s = 255 everything is infinite or NaN: both
are refused by the tensor's name, as in any checkpoint.

Shapes: blocks [E, N, G, 16] uint8 and scales [E, N, G] uint8 of matrices [N, K] with K = 32 G, one for each
of E experts. The result is [E, K, N], as gpt-oss has its experts.
"""

import torch

BLOCKS, SCALES = "_blocks", "_scales"  # how the names of such tensors end
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers in bf16. Raises ValueError for a shape or a dtype that is not that of MXFP4."""
    shape = dequantised_shape(blocks.shape, scales.shape)
    if not blocks.dtype == scales.dtype == torch.uint8:
        raise ValueError(f"blocks in {blocks.dtype} and scales in {scales.dtype} must be bytes (uint8)")
    values = torch.tensor([*_VALUES, *(-x for x in _VALUES)])
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1)
    numbers = values[halves.flatten(3).int()] * torch.exp2(scales.double() - 127.0).float().unsqueeze(3)
    return numbers.bfloat16().flatten(2).transpose(1, 2).reshape(shape)


def dequantised_shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int, int]:
    """[E, K, N] of the shapes of blocks and scales. Raises ValueError where they do not fit."""
    if len(blocks) != 4 or blocks[3] != 16 or tuple(blocks[:3]) != tuple(scales):
        raise ValueError(
            f"blocks {tuple(blocks)} and scales {tuple(scales)} must be [E, N, G, 16] and [E, N, G]"
        )
    E, N, G, _ = blocks
    return E, 32 * G, N
