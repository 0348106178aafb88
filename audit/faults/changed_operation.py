"""What a file of operations/ says of an operation: which changes are tried, and how they are planted."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ...model.operation import Equation
from ...model.operations import input_names
from ..operations.plain_operations import Lookup, Operations, Tensor

Change = tuple[str, Tensor]  # what would be changed, in words, and the output that it would give
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHORT = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Traced:
    """One operation of an engine, and the same by the checkpoint in fp64."""

    op: str
    actual: Tensor  # the engine's output
    exact: Operations
    lookup: Lookup  # of the engine's outputs, by operation
    trace: dict[str, Tensor]

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The operation's inputs in the engine, in fp64."""
        return [self.lookup(name).double() for name in input_names(self.op, self.exact.checkpoint.config)]


@dataclass(frozen=True)
class ModelPlant:
    """A change of transformers' model, the operation at fault, and words of its explanation.

    family: the model_type of a model that has what is changed; empty where the tests' usual one has it.
    """

    plant: Callable[[torch.nn.Module], None]
    op: str
    words: str
    family: str = ""


@dataclass(frozen=True, kw_only=True)
class ChangedOperation:
    """The faults of one kind of operation. Its file holds it as CHANGED.

    changes: the changed operations, the likeliest first.
    """

    equations: tuple[Equation, ...]
    changes: Callable[[Traced], Iterator[Change]]
    plants: tuple[ModelPlant, ...] = ()
