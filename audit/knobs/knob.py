"""A knob: one number at one kind of operation of a model, in all layers or in some.

    scale      y = m f(x)                                 neutral 1
    shift      w + a, of a norm's weight; y + a           neutral 0
    epsilon    of a norm                                  neutral: the model's
    fp8, bf16  an output, or a weight, rounded            neutral 0; 1 rounds
    scores     m q k^T, before the cap and the softmax    neutral 1
    values     p (m v)                                    neutral 1
    reach      keys that a token reads, itself included   neutral: all, as 0
    cap        c tanh(s / c) of the scores                neutral: none, as 0
    positions  m p of the rotation                        neutral 1
    base       m times the base of the rotation           neutral 1
    offset     p + n of learned positions                 neutral 0
    skip       m x + f(x) of a whole layer                neutral 1
    clamp      the output within -c and c                 neutral: none, as 0
    swap, mask another operation of the kind (swaps.py)   neutral 0; 1 has it

Knobs are hooks on transformers' own modules. Attention must be eager: its two products are seen by a
TorchFunctionMode, because no module returns them.

Shapes: B sequences, H heads, T tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..engines.module_trace import first_tensor
from .module_places import Place

Change = AbstractContextManager[None]
_OF_PRODUCTS = ("scores", "values", "reach", "cap", "mask")
PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_E4M3_LARGEST = 448.0
# What a forward with a knob may raise that the model's module does not take.
REFUSALS = (RuntimeError, TypeError, AttributeError, IndexError, ValueError, KeyError)


@dataclass(frozen=True)
class Knob:
    """What is turned, and where. `values`: those that a search begins with; of a discrete one all."""

    place: Place
    what: str
    neutral: float
    values: tuple[float, ...] = ()
    step: float = 0.05  # from the neutral value, for a slope; 0 where there is none
    low: float = -1e9
    high: float = 1e9
    is_whole: bool = False  # a number of tokens
    says: str = ""  # of a swap: what is computed instead
    # Of a swap: the context in which a module, of a layer, computes something else. Of a mask: which tokens
    # are read, of the places of those that read and of those that are read.
    change: Callable[..., Any] | None = field(default=None, compare=False)
    names_layers: bool = False  # whether its words do

    @property
    def name(self) -> str:
        """The operation, in words."""
        words = {
            "scores": "attention's scores",
            "values": "attention's values",
            "reach": "attention's reach",
            "cap": "attention's cap",
            "positions": "positions",
            "base": "the rotation's base",
            "layer base": "the rotation's base",
            "offset": "learned positions",
        }
        return self.says or words.get(self.what, self.place.kind)

    def words(self, value: float) -> str:
        """What is done with the value."""
        forms = {
            "swap": self.says,
            "mask": self.says,
            "skip": f"{self.name}'s input times {value:.4g} in the residual sum",
            "clamp": f"the output of {self.name} clamped at {value:.4g}",
            "shift": f"{self.name} with {value:+.4g} on its weight",
            "bias": f"{self.name} with {value:+.4g} on its output",
            "epsilon": f"{self.name} with an epsilon of {value:.3g}",
            "fp8 output": f"the output of {self.name} rounded to fp8 (e4m3)",
            "fp8 weight": f"the weight of {self.name} rounded to fp8 (e4m3, a scale for each tensor)",
            "bf16 output": f"the output of {self.name} rounded to bfloat16",
            "reach": f"attention that reads {value:.0f} tokens back, itself included",
            "cap": f"attention's scores soft-capped at {value:.4g}",
            "offset": f"{self.name} shifted by {value:+.0f}",
        }
        return forms.get(self.what, f"{self.name} times {value:.4g}")


@dataclass(frozen=True)
class Turn:
    """A knob at a value, in some layers of its place."""

    knob: Knob
    value: float
    layers: tuple[int, ...]

    @property
    def is_everywhere(self) -> bool:
        """Whether it is so in all layers."""
        return self.layers == self.knob.place.layers


@contextmanager
def turned(turns: Sequence[Turn]) -> Iterator[None]:
    """Inside this context the model computes with these knobs."""
    with ExitStack() as stack:
        products: dict[torch.nn.Module, list[Turn]] = {}
        for turn in turns:
            for layer in turn.layers:
                module = turn.knob.place.modules[layer]
                if turn.knob.what in _OF_PRODUCTS:
                    products.setdefault(module, []).append(turn)
                elif turn.knob.what in ("swap", "layer base"):
                    stack.enter_context(turn.knob.change(module, layer, turn.value))
                else:
                    stack.enter_context(_APPLY[turn.knob.what](module, turn))
        if products:
            stack.enter_context(_Attention(products))
        yield


@contextmanager
def output_changed(
    module: torch.nn.Module, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Inside this context the first tensor that a module gives is another: change, of its input and of it."""

    def hook(_module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
        x, y = first_tensor([*args, *kwargs.values()]), first_tensor(out)
        if isinstance(out, torch.Tensor):
            return change(x, y)
        return type(out)(change(x, y) if z is y else z for z in out) if isinstance(out, tuple | list) else out

    handle = module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _with(module: torch.nn.Module, name: str, value: Any) -> Iterator[None]:
    """Inside this context an attribute has another value."""
    old = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, old)


@contextmanager
def weight_changed(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside this context a module has another weight, and whoever shares it, too."""
    old = module.weight.data
    module.weight.data = change(old)
    try:
        yield
    finally:
        module.weight.data = old


@contextmanager
def computing(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside this context a module computes another function. What stood on it before stands there again."""
    kept = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if kept is not None:
            module.forward = kept


def fp8(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """x rounded to e4m3, with a scale that makes the largest one 448: of the whole tensor, or along `dim`."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest.clamp(min=1e-12) / _E4M3_LARGEST
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


@contextmanager
def _positions(module: torch.nn.Module, turn: Turn) -> Iterator[None]:
    """The rotation with stretched positions."""

    def hook(_module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        def stretched(x: Any) -> Any:
            return x.double() * turn.value if isinstance(x, torch.Tensor) and not x.is_floating_point() else x

        return tuple(map(stretched, args)), {name: stretched(x) for name, x in kwargs.items()}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def base_changed(module: torch.nn.Module, times: float) -> Iterator[None]:
    """The rotation with another base: frequency i of n is divided by m^(i / n)."""
    with ExitStack() as stack:
        for name, x in list(module.named_buffers(recurse=False)):
            if name.endswith("inv_freq"):
                exponents = torch.arange(len(x), device=x.device, dtype=x.dtype) / len(x)
                stack.enter_context(_with(module, name, x * times**-exponents))
        yield


@contextmanager
def _offset(module: torch.nn.Module, turn: Turn) -> Iterator[None]:
    """Learned positions, shifted; beyond the ends the last one counts."""
    handle = module.register_forward_pre_hook(
        lambda m, args: ((args[0] + int(turn.value)).clamp(0, m.num_embeddings - 1), *args[1:])
    )
    try:
        yield
    finally:
        handle.remove()


_APPLY: dict[str, Callable[[torch.nn.Module, Turn], Any]] = {
    "scale": lambda module, t: output_changed(module, lambda _x, y: y * t.value),
    "bias": lambda module, t: output_changed(module, lambda _x, y: y + t.value),
    "shift": lambda module, t: weight_changed(module, lambda w: w + t.value),
    "epsilon": lambda module, t: _with(module, t.knob.place.eps, t.value),
    "fp8 output": lambda module, t: output_changed(module, lambda _x, y: fp8(y, -1)),
    "bf16 output": lambda module, t: output_changed(module, lambda _x, y: y.bfloat16().to(y.dtype)),
    "fp8 weight": lambda module, t: weight_changed(module, fp8),
    "positions": _positions,
    "base": lambda module, t: base_changed(module, t.value),
    "skip": lambda module, t: output_changed(module, lambda x, y: y + (t.value - 1.0) * x),
    "clamp": lambda module, t: output_changed(module, lambda _x, y: y.clamp(-t.value, t.value)),
    "offset": _offset,
}


class _Attention(TorchFunctionMode):
    """Changes the two products of attention in some modules: of queries and keys, and of these and values."""

    def __init__(self, turns: dict[torch.nn.Module, list[Turn]]):
        super().__init__()
        self._turns, self._handles = turns, []
        self._now: list[
            tuple[torch.nn.Module, list[int]]
        ] = []  # the module that runs, and its products so far

    def __enter__(self) -> "_Attention":
        for module in self._turns:
            before = module.register_forward_pre_hook(lambda m, *_: self._now.append((m, [0])))
            after = module.register_forward_hook(lambda *_: self._now.clear())
            self._handles += [before, after]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if not self._now or function not in PRODUCTS or out.dim() != 4:
            return out
        module, products = self._now[-1]
        products[0] += 1
        for turn in self._turns[module]:
            if (turn.knob.what == "values") == (products[0] == 2) and products[0] <= 2:
                out = _of_product(out, turn, module)
        return out


def _of_product(x: torch.Tensor, turn: Turn, module: torch.nn.Module) -> torch.Tensor:
    """A product of attention with a knob: scores [B, H, T, T], or what they make of values [B, H, T, D]."""
    if turn.knob.what in ("scores", "values"):
        return x * turn.value
    if turn.knob.what == "cap":
        cap = turn.value / _scaling(module)
        return cap * torch.tanh(x / cap)
    T = x.shape[-1]
    if turn.knob.what == "mask":
        places = torch.arange(T, device=x.device)
        return x.masked_fill(~turn.knob.change(places[T - x.shape[-2] :, None], places), -torch.inf)
    far = torch.ones(T, T, dtype=torch.bool, device=x.device).tril(-int(turn.value))
    return x.masked_fill(far[-x.shape[-2] :], -torch.inf)


def _scaling(module: torch.nn.Module) -> float:
    """What an attention multiplies its scores with, after the product."""
    scaling = getattr(module, "scaling", None)
    return scaling if isinstance(scaling, float) else float(module.head_dim) ** -0.5
