"""Ranks: the processes of `torchrun -m zerokl train`, each with its own part of the prompts and of the
virtual shards (ranked.py).

The gradient is the root of the one tree of gradient.py: the ranks' shards of a round are neighbours, and
slices.py adds them in the tree's order. Each rank updates its own slice of the weights and sends it to all.
Rank 0 alone writes files.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

X = TypeVar("X")


@dataclass(frozen=True)
class Ranks:
    """This process's place among `size` ranks."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks. Raises ChildProcessError when one has died."""
        if self.size > 1:
            with peers():
                dist.barrier()

    def gather(self, make: Callable[[], X]) -> list[X]:
        """make() of every rank, in order. What the first rank to fail raised is raised in all."""
        if self.size == 1:
            return [make()]
        try:
            mine: tuple[bool, Any] = (True, make())
        except Exception as error:
            mine = (False, error)
        every: list[Any] = [None] * self.size
        with peers():
            dist.all_gather_object(every, mine)
        for rank, (good, value) in enumerate(every):
            if not good:
                raise (
                    ChildProcessError(f"{value} (of rank {rank})")
                    if isinstance(value, ChildProcessError)
                    else value
                )
        return [value for _, value in every]

    def from_first(self, make: Callable[[], X]) -> X:
        """make() of rank 0, in every rank."""
        return self.gather(make if self.first else lambda: None)[0]


ALONE = Ranks()


@contextmanager
def peers() -> Iterator[None]:
    """Says in one line what a collective's error means."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ChildProcessError(
            f"another rank has ended or does not answer ({reason}); torchrun names it and its exit code; "
            "`zerokl train --resume` goes on with the run, with any number of ranks"
        ) from None


def world_size() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "MASTER_ADDR" in os.environ else 1


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """The ranks that torchrun started this process among; one without it.

    compatibility.py says what they can share.
    """
    size, rank = world_size(), int(os.environ.get("RANK", "0"))
    if size == 1:
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Ranks(rank, size)
    finally:
        dist.destroy_process_group()
