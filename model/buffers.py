"""Numbers of a model that no gradient reaches, and that are fp32 whatever the compute dtype.

All weights lie in one flat tensor of one dtype. A router's correction bias in 16 bits would choose other
experts: DeepSeek-V3 moves it by 0.001, and bf16 has steps of 0.06 above 8. So the flat tensor holds the four
bytes of each number: 0 to 255 are exact in every compute dtype. Such a weight is frozen, and goes wherever
weights go: to samplers, ranks and processes, and into hashes. Files of a checkpoint hold the numbers.

Shapes: n numbers.
"""

from collections.abc import Collection, Iterable, Iterator

import torch

BYTES = 4


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """The bytes [4 n], in fp32, of numbers [n]. fp32 holds every dtype of a checkpoint exactly."""
    return numbers.float().contiguous().view(torch.uint8).float()


def as_numbers(held: torch.Tensor) -> torch.Tensor:
    """The numbers [n], in fp32, of their bytes [4 n] in any dtype."""
    return held.to(torch.uint8).contiguous().view(torch.float32)


def all_as_numbers(
    tensors: Iterable[tuple[str, torch.Tensor]], buffers: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors by name, with numbers in place of the bytes of those that are `buffers`."""
    return ((name, as_numbers(x.detach()) if name in buffers else x) for name, x in tensors)
