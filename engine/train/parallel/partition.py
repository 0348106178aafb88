"""How a step's sequences are cut into virtual shards, a shard into micro-batches, and requests into parts."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import TypeVar

from ...rollout.types import Request, RngKey

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


class RequestParts:
    """Cuts the requests of each call into parts. A trajectory comes back to the part that had its last turn.

    There its keys and values may still be in a cache. Requests that continue equal ids stay together, because
    they are read once. All else is cut into consecutive parts. No part gets more of such groups than an even
    cut gives it. So where trajectories of one part outlive those of others, some of them move, and are read
    again as a whole. Which part has a request decides no bit.
    """

    def __init__(self, parts: int):
        self._parts = parts
        self._homes: dict[RngKey, int] = {}  # of trajectories with turns that others might follow

    def cut(self, requests: Sequence[Request]) -> list[list[int]]:
        """The indices of the requests of each part, ascending.

        The last parts are empty where there are fewer groups than parts.
        """
        indices = range(len(requests))
        groups = [list(group) for _, group in groupby(indices, key=lambda i: requests[i].ids)]
        sizes = [len(part) for part in virtual_shards(groups, self._parts)]
        room = sorted(sizes, key=bool, reverse=True)
        parts: list[list[int]] = [[] for _ in room]
        others: list[list[int]] = []
        for group in groups:
            home = self._homes.get(requests[group[0]].rng_key)
            if home is None or not room[home]:
                others.append(group)
            else:
                parts[home] += group
                room[home] -= 1
        places = chain.from_iterable([part] * groups_left for part, groups_left in enumerate(room))
        for group, part in zip(others, places, strict=True):
            parts[part] += group
        for part, members in enumerate(parts):
            members.sort()
            going_on = (requests[i] for i in members if requests[i].trajectory_tokens)
            self._homes |= {request.rng_key: part for request in going_on}
        return parts

    def forget(self) -> bool:
        """Forget where trajectories were. Returns whether a part may have kept something for later turns."""
        had_any = bool(self._homes)
        self._homes.clear()
        return had_any


def in_order(parts: Sequence[Sequence[int]], results: Sequence[Sequence[X]]) -> list[X]:
    """The results of all parts in the order of the requests. parts: as RequestParts.cut gives them."""
    by_index = {
        i: result
        for part, part_results in zip(parts, results, strict=True)
        for i, result in zip(part, part_results, strict=True)
    }
    return [by_index[i] for i in range(len(by_index))]
