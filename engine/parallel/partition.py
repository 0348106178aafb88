"""How a step's sequences are cut into virtual shards, a shard into micro-batches, and requests into parts."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import TypeVar

from ..rollout.types import Request

X = TypeVar("X")


def virtual_shards(sequences: Sequence[X], shards: int) -> list[Sequence[X]]:
    """Cut `sequences` into `shards` consecutive parts of nearly equal size.

    Some parts are empty when there are fewer sequences than shards.
    """
    n = len(sequences)
    return [sequences[s * n // shards : (s + 1) * n // shards] for s in range(shards)]


def parts_of_prompts(requests: Sequence[Request], parts: int) -> list[list[Request]]:
    """Cut requests into consecutive parts. Those that continue equal ids stay together: they are read once.

    Some parts are empty where there are fewer prompts than parts.
    """
    prompts = [list(group) for _, group in groupby(requests, key=lambda request: request.ids)]
    return [list(chain.from_iterable(part)) for part in virtual_shards(prompts, parts)]


def micro_batches(n: int, size: int) -> Iterator[slice]:
    """Slices of n consecutive sequences, `size` at a time."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))
