"""A row of the table of operations (operations.py). The blocks have them (blocks/)."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# Read by an operation: the residual stream before its layer, or after the last one.
STREAM = "stream"


class Work(NamedTuple):
    """What goes through a model; or the floating-point operations for each."""

    tokens: int = 0  # through its layers
    pairs: int = 0  # of a token and a token that it attends to
    drawn: int = 0  # tokens whose log-probability is computed


NO_WORK = Work()


class Equation(Enum):
    """How an operation computes its output from what it reads."""

    EMBEDDING = "rows of a weight, by token id"
    NORM = "RMS norm over the width of its weight"
    LINEAR = "x w^T + bias"
    ROPE = "rotary embedding of each head"
    LATENT_ROPE = "rotary embedding of the last part of each head, which keys share"
    ATTENTION = "causal attention"
    LATENT_ATTENTION = "causal attention, with values beside parts of keys"
    SUM = "x + factor y"
    SILU_MUL = "silu(x) y"
    GELU_MUL = "gelu(x) y, of the tanh form"
    EXPERTS = "the weighted sum of the MLPs of the chosen experts"
    ADD_GATED = "x + sigmoid(z) y, with one z for each row"
    CONV_SILU = "silu of a causal convolution of each channel"
    DELTA_RULE = "gated delta rule"
    GATED_NORM = "RMS norm of each head, times silu of a gate"
    MUL_SIGMOID = "x sigmoid(z), with z beside the queries of each head"
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
    heads_first: bool = False  # whether it returns [1, H, T, D], and not [1, T, ...]
    # Where it is set, the module is of the next layer; after the last layer it is this one, from the model.
    after_last: str = ""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a decoder. Its output is [T, width], that of `logprob` [C, 1] for C drawn tokens."""

    name: str
    equation: Equation
    reads: tuple[str, ...]  # names in the same layer, or STREAM
    width: int
    # In transformers a weight has the name of its module.
    transformers: Site | None
    vllm: Site | None
    remedy: str  # what an audit advises where the operation is at fault
    # Floating-point operations. Products are counted, as PaLM does (arXiv:2204.02311), and nothing else.
    flops: Work = NO_WORK
    # What a layer keeps of each row for its backward: numbers in the compute dtype, and fp32 numbers.
    kept: int = 0
    kept_fp32: int = 0
    # The scale of an attention's scores; or what a sum's second part, an embedding or logits are times.
    factor: float = 1.0
    eps: float | None = None  # of a norm, where it is not the model's
    window: int = 0  # the last keys that a row of an attention sees; 0 is all
    sinks: bool = False  # whether each row of an attention has a logit more, of its head
    cap: float = 0.0  # of an attention's scores, or of logits: x becomes cap tanh(x / cap); 0.0 is none
    fused: str = ""  # the name that our decoder gives to several operations that it computes as one
    # The module of its weight in a checkpoint, where that is another one than transformers'.
    weight: str = ""


def norm_row(name: str, reads: str, width: int, module: str, **others: object) -> Operation:
    """A norm, which engines show in one module."""
    return Operation(
        name=name,
        equation=Equation.NORM,
        reads=(reads,),
        width=width,
        transformers=Site(module),
        vllm=Site(module),
        remedy="Compare the norm's weight and its epsilon with the checkpoint's.",
        **others,
    )


def projection_row(
    name: str, reads: str, inputs: int, width: int, module: str, vllm: str = "", **others: object
) -> Operation:
    """A matrix product. module: of transformers; vllm: of vLLM, where it is another one."""
    return Operation(
        name=name,
        equation=Equation.LINEAR,
        reads=(reads,),
        width=width,
        **{
            "transformers": Site(module),
            "vllm": Site(vllm or module),
            "flops": Work(tokens=2 * inputs * width),
            "remedy": _WEIGHT_REMEDY,
        }
        | others,
    )


_WEIGHT_REMEDY = (
    "Compare this weight in the engine's memory with the checkpoint's: a sync, a merge of an adapter, a "
    "quantisation or a sharding changed it."
)
