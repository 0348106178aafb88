"""How a step's sequences are cut into virtual shards, and a shard into micro-batches."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

X = TypeVar("X")


def virtual_shards(sequences: Sequence[X], shards: int) -> list[Sequence[X]]:
    """Cut `sequences` into `shards` consecutive parts of nearly equal size.

    Some parts are empty when there are fewer sequences than shards.
    """
    n = len(sequences)
    return [sequences[s * n // shards : (s + 1) * n // shards] for s in range(shards)]


def micro_batches(n: int, size: int) -> Iterator[slice]:
    """Slices of n consecutive sequences, `size` at a time."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))
