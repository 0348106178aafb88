"""A row of the table of operations (operations.py). Importing this module loads no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .config import ModelConfig

Size = Callable[["ModelConfig"], int]


class Work(NamedTuple):
    """What goes through a model."""

    tokens: int  # through its layers
    pairs: int  # of a token and a token that it attends to
    drawn: int  # tokens whose log-probability is computed


class Equation(Enum):
    """How an operation computes its output from what it reads."""

    EMBEDDING = "rows of a weight, by token id"
    NORM = "RMS norm over the width of its weight"
    LINEAR = "x w^T + bias"
    ROPE = "rotary embedding of each head"
    ATTENTION = "causal attention"
    SUM = "x + y"
    SILU_MUL = "silu(x) y"
    EXPERTS = "the weighted sum of the MLPs of the chosen experts"
    LOGPROB = "log-probability of the drawn token"


class Shown(Enum):
    """What of a module is an operation's output."""

    OUTPUT = "what it returns"
    INPUT = "what it is given"
    QUERY = "the queries of the attention product in it"
    KEY = "the keys of the attention product in it"


class Site(NamedTuple):
    """The module of an engine's model that shows an operation's output.

    Operations of one layer that have equal sites are parts of one output, side by side.
    """

    module: str  # dotted, from the layer, or from the model where the operation is in no layer
    shown: Shown = Shown.OUTPUT
    element: int = 0  # of what the module returns, where that is a tuple
    # Where it is set, the module is of the next layer; after the last layer it is this one, from the model.
    after_last: str = ""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a decoder."""

    name: str
    equation: Equation
    reads: tuple[str, ...]  # names in the same layer, or operations.STREAM
    width: Size
    # In transformers a weight has the name of its module.
    transformers: Site | None
    vllm: Site | None
    remedy: str  # what an audit advises where the operation is at fault
    # Floating-point operations. Products are counted, as PaLM does (arXiv:2204.02311), and nothing else.
    flops: Callable[["ModelConfig", Work], int] = lambda c, work: 0
    # What a layer keeps of each row for its backward: numbers in the compute dtype, and fp32 numbers.
    kept: Size = lambda c: 0
    kept_fp32: Size = lambda c: 0
    in_layer: bool = True
    only_with: str = ""  # the field of ModelConfig that says whether a model has it
    sparse: bool | None = None  # whether only layers with experts have it, or only those without; None: all
    instead: str = ""  # what takes its place in a layer that lacks it
    fused: str = ""  # the name that our decoder gives to several operations that it computes as one

    def is_in(self, config: "ModelConfig", layer: int | None = None) -> bool:
        """Whether such a model has the operation, in this layer, or in any where no layer is given."""
        layers = range(config.layers) if layer is None else [layer]
        in_layers = self.sparse is None or any(config.is_sparse(i) == self.sparse for i in layers)
        return in_layers and (not self.only_with or getattr(config, self.only_with))
