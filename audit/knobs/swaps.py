"""Swaps: an operation of a model in place of which another one of its kind is computed, in a layer or in all.

    another function    of an activation or a norm; the input as it is; the operation twice
    another module      of the same shape: of another layer, or of another kind in the layer
    other parts         heads, halves, quarters of an input or output: two change places, one is 0
    other bits          of a weight: int8 by row, int4 by row or by groups of 32
    another mask        of attention: without the token itself, without the first one
    another rotation    none, of half of the frequencies, of pairs, with another base in one layer

A swap is a knob whose value is 0 without it and 1 with it. Nothing is between, so it has no slope.

Shapes: B sequences, H heads, T tokens, D width of a head.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import torch
from torch.nn import functional as F

from ..engines.module_trace import first_tensor
from .knob import Change, Knob, base_changed, computing, output_changed, weight_changed
from .module_places import Place, Places

Tensor = torch.Tensor
# Layers and heads up to which all pairs change places; of more only neighbours.
_ALL_PAIRS = 8
_ORDINALS = "first", "second", "third", "fourth"
# Parts of a width, in words: of all, and of each.
_PARTS = {
    parts: [f"the {ordinal} {part}" for ordinal in _ORDINALS[:n]]
    for n, part, parts in ((2, "half", "halves"), (4, "quarter", "quarters"))
}
_BASES = (0.01, 0.1, 0.5, 2.0, 10.0, 100.0)
_GROUP = 32  # weights of one scale of int4


@dataclass(frozen=True)
class _Maker:
    """Makes the swaps of one place."""

    place: Place

    def swap(self, words: str, change: Callable[[torch.nn.Module, int], Change], **fields: Any) -> Knob:
        """words: of the change, with the place's name in braces. change: of a module and its layer."""
        words = words.format(self.place.kind)
        change_to = lambda module, layer, _value: change(module, layer)  # noqa: E731
        return Knob(self.place, "swap", 0.0, (1.0,), 0.0, says=words, change=change_to, **fields)

    def output(self, words: str, f: Callable[[Tensor, Tensor], Tensor]) -> Knob:
        """f: of the first input and of what the module gives."""
        return self.swap(words, lambda module, _: output_changed(module, f))


def swaps_of(places: Places) -> Iterator[Knob]:
    """All swaps of a model, the simple ones first."""
    for place in (*places.blocks, *places.modules):
        yield from _functions(_Maker(place))
        yield from _bits(_Maker(place))
        yield from _layers_exchanged(place)
    for place in places.attention:
        yield from _masks(_Maker(place))
        yield from _rotations(_Maker(place), places)
    yield from _kinds_exchanged(places)
    yield from _reads(places)
    yield from _of_pairs(places)
    for place in places.modules:
        yield from _parts(_Maker(place), places.head_dim)


# --- another function ---


def _functions(maker: _Maker) -> Iterator[Knob]:
    place = maker.place
    if place.is_norm:
        yield from _norms(maker)
    if not list(place.first.parameters()) and not list(place.first.children()):
        for words, f in _ACTIVATIONS.items():
            yield maker.output(f"{words} in place of {{}}", lambda x, _y, f=f: f(x))
    else:
        yield maker.output("{} left out, its input goes on", lambda x, y: x + 0 * y)
        yield maker.swap("{} applied twice", lambda module, _: _twice(module))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "no activation": lambda x: x,
    "ReLU": F.relu,
    "ReLU squared": lambda x: F.relu(x).square(),
    "GELU": F.gelu,
    "GELU of the tanh form": lambda x: F.gelu(x, approximate="tanh"),
    "GELU of the sigmoid form": lambda x: x * torch.sigmoid(1.702 * x),
    "SiLU": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "1": torch.ones_like,
}


def _mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def _norms(maker: _Maker) -> Iterator[Knob]:
    def normed(x: Tensor, y: Tensor, other: Callable[[Tensor], Tensor]) -> Tensor:
        """y with another divisor: other gives the mean square, of x [..., D]."""
        return y * torch.rsqrt(other(x) + 1e-6) * torch.sqrt(_mean_square(x) + 1e-6)

    for words, half in (("first", 0), ("last", 1)):
        yield maker.output(
            f"{{}} over the {words} half of its width",
            lambda x, y, half=half: normed(x, y, lambda x: _mean_square(x.chunk(2, -1)[half])),
        )
    yield maker.swap("{} less the mean, as LayerNorm", lambda module, _: _centred(module))
    yield maker.output("{} without its division", lambda x, y: y * torch.sqrt(_mean_square(x)))
    yield maker.swap("{} without its weight", lambda module, _: weight_changed(module, torch.ones_like))


@contextmanager
def _input_changed(module: torch.nn.Module, f: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside this context a module reads another first input."""
    handle = module.register_forward_pre_hook(lambda _m, args: (f(args[0]), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def _centred(module: torch.nn.Module) -> Change:
    return _input_changed(module, lambda x: x - x.mean(-1, keepdim=True))


def _twice(module: torch.nn.Module) -> Change:
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        once = first_tensor(plain(*args, **kwargs))
        return plain(once, *args[1:], **kwargs) if args else plain(**{**kwargs, "hidden_states": once})

    return computing(module, forward)


# --- other bits ---


def _int(w: Tensor, most: float, group: int) -> Tensor:
    """w with whole numbers up to `most` for each group of a row."""
    x = w.reshape(w.shape[0], -1, group) if w.shape[-1] % group == 0 else w.unsqueeze(1)
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
    return ((x / scale).round() * scale).reshape(w.shape)


def _bits(maker: _Maker) -> Iterator[Knob]:
    if not maker.place.is_matrix:
        return
    for words, f in (
        ("int8, a scale for each row", lambda w: _int(w, 127.0, w.shape[-1])),
        ("int4, a scale for each row", lambda w: _int(w, 7.0, w.shape[-1])),
        (f"int4, a scale for {_GROUP} weights", lambda w: _int(w, 7.0, _GROUP)),
    ):
        yield maker.swap(f"the weight of {{}} rounded to {words}", lambda m, _, f=f: weight_changed(m, f))


# --- another module ---


def _pairs_of(items: Sequence[int]) -> Iterable[tuple[int, int]]:
    """All pairs of few, the neighbours of many."""
    return combinations(items, 2) if len(items) <= _ALL_PAIRS else pairwise(items)


def _layers_exchanged(place: Place) -> Iterator[Knob]:
    """The modules of two layers change places, or one stands in both."""
    if not list(place.first.parameters()):
        return
    for a, b in _pairs_of(place.layers):
        both = replace(place, modules={a: place.modules[a], b: place.modules[b]})
        forward = {i: both.modules[j].forward for i, j in ((a, b), (b, a))}

        def change(module: torch.nn.Module, layer: int, forward: dict = forward) -> Change:
            return computing(module, forward[layer])

        names = _layer_names(place.kind, a, b)
        yield _Maker(both).swap(f"{names} in each other's place", change, names_layers=True)
        for i, j in ((a, b), (b, a)):
            one = replace(place, modules={i: place.modules[i]})
            words = f"{_layer_names(place.kind, i)} as it is in layer {j}"
            yield _Maker(one).swap(words, change, names_layers=True)


def _layer_names(kind: str, *layers: int) -> str:
    where = " and ".join(map(str, layers))
    return f"{kind}s {where}" if kind == "layer" else f"{kind} in layer{'s' * (len(layers) > 1)} {where}"


def _kinds_exchanged(places: Places) -> Iterator[Knob]:
    """Two kinds of a layer whose weights have one shape change places."""
    inside = [x for x in places.modules if x.weight is not None and not x.is_embedding]
    for a, b in combinations(inside, 2):
        if a.weight.shape != b.weight.shape or a.layers != b.layers or -1 in a.layers:
            continue

        @contextmanager
        def change(module: torch.nn.Module, layer: int, b: Place = b) -> Iterator[None]:
            other = b.modules[layer]
            here, there = module.forward, other.forward
            with computing(module, there), computing(other, here):
                yield

        yield _Maker(a).swap(f"{{}} and {b.kind} in each other's place", change)


def _reads(places: Places) -> Iterator[Knob]:
    """A norm reads what an earlier norm of its layer reads, as parallel blocks do."""
    norms = [x for x in places.modules if x.is_norm and -1 not in x.layers]
    for a, b in combinations(norms, 2):
        if a.layers != b.layers or a.weight is None or a.weight.shape != getattr(b.weight, "shape", None):
            continue

        @contextmanager
        def change(module: torch.nn.Module, layer: int, a: Place = a) -> Iterator[None]:
            kept: list[Tensor] = []
            handle = a.modules[layer].register_forward_pre_hook(
                lambda _m, args: kept.__setitem__(slice(None), args[:1])
            )
            try:
                with _input_changed(module, lambda x: kept[0] if kept and kept[0].shape == x.shape else x):
                    yield
            finally:
                handle.remove()

        yield _Maker(b).swap(f"{{}} that reads what {a.kind} reads", change)


# --- other parts ---


def _of_pairs(places: Places) -> Iterator[Knob]:
    """Queries and keys with the dimensions of a head in the order of rotated pairs, or of halves again."""
    by_kind = {x.kind.rpartition(".")[2]: x for x in places.modules}
    q, k, D = by_kind.get("q_proj"), by_kind.get("k_proj"), places.head_dim
    if not q or not k or D % 2:
        return
    pairs = torch.arange(D).view(2, -1).t().flatten()
    for words, order in (("pairs, interleaved", pairs), ("halves", pairs.argsort())):

        @contextmanager
        def change(module: torch.nn.Module, layer: int, order: Tensor = order) -> Iterator[None]:
            def ordered(_x: Tensor, y: Tensor) -> Tensor:
                return y.unflatten(-1, (-1, D))[..., order].flatten(-2)

            with output_changed(module, ordered), output_changed(k.modules[layer], ordered):
                yield

        yield _Maker(q).swap(f"{{}} and {k.kind} in the order of {words}", change)


def _parts(maker: _Maker, head_dim: int) -> Iterator[Knob]:
    """Parts of what a product reads or gives."""
    place = maker.place
    if not place.is_matrix or -1 in place.layers:
        return
    for side, width in (("output", place.weight.shape[0]), ("input", place.weight.shape[1])):
        heads = width // head_dim if "attn" in place.kind or "attention" in place.kind else 0
        as_heads = [("heads", [f"head {i}" for i in range(heads)])] * (heads > 1)
        for parts, names in [*as_heads, *_PARTS.items()]:
            count = len(names)
            if width % count:
                continue
            for words, f in _orders(parts, names):
                yield _of_side(maker, side, words, f, count)


def _of_side(maker: _Maker, side: str, words: str, f: Callable[[Tensor], Tensor], count: int) -> Knob:
    def split(x: Tensor) -> Tensor:
        return f(x.unflatten(-1, (count, -1))).flatten(-2)

    says = f"the {side} of {{}} with {words}"
    if side == "output":
        return maker.output(says, lambda _x, y: split(y))
    return maker.swap(says, lambda module, _: _input_changed(module, split))


def _orders(parts: str, names: Sequence[str]) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Parts [..., count, D] that are lost, or in another order. parts, names: words for all, for each."""
    count = len(names)
    for i, j in _pairs_of(range(count)):
        order = list(range(count))
        order[i], order[j] = j, i
        yield f"{names[i]} and {names[j]} exchanged", lambda x, order=tuple(order): x[..., list(order), :]
    if count > 2:
        yield f"the order of its {parts} reversed", lambda x: x.flip(-2)
    for i in range(count):
        keep = torch.tensor([float(k != i) for k in range(count)]).unsqueeze(-1)
        yield f"{names[i]} lost", lambda x, keep=keep: x * keep.to(x.device)


# --- attention ---


def _masks(maker: _Maker) -> Iterator[Knob]:
    """Fewer tokens are read than the model's own mask lets."""

    def without_itself(here: Tensor, there: Tensor) -> Tensor:
        return (there < here) | (here == 0)

    def without_first(here: Tensor, there: Tensor) -> Tensor:
        return (there > 0) | (here == 0)

    for words, f in (("the token itself", without_itself), ("the first token", without_first)):
        says = f"attention that does not read {words}"
        yield Knob(maker.place, "mask", 0.0, (1.0,), 0.0, says=says, change=f)


def _rotations(maker: _Maker, places: Places) -> Iterator[Knob]:
    """Angles of one layer: cos and sin [B, T, D], the frequencies of the first half twice."""

    def first_half(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        D = cos.shape[-1]
        keep = (torch.arange(D, device=cos.device) % (D // 2)) < D // 4
        return torch.where(keep, cos, torch.ones_like(cos)), sin * keep

    def none(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(cos), torch.zeros_like(sin)

    for words, f in (("of half of the frequencies, a partial rotary", first_half), ("left out", none)):
        yield maker.swap(f"the rotation {words}", lambda m, _, f=f: _rotated(m, lambda _kw, pair: f(*pair)))
    if len(places.rotations) != 1 or places.rotations[0].layers != (-1,):
        return
    rotation = places.rotations[0].first

    @contextmanager
    def based(m: torch.nn.Module, _layer: int, times: float) -> Iterator[None]:
        def other(kwargs: dict[str, Any], pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            with base_changed(rotation, times):
                return rotation(pair[0], kwargs["position_ids"])

        with _rotated(m, other):
            yield

    if len(maker.place.layers) > 1:
        yield Knob(maker.place, "layer base", 1.0, _BASES, 0.1, 1e-3, 1e3, change=based)


@contextmanager
def _rotated(module: torch.nn.Module, f: Callable[[dict[str, Any], Any], Any]) -> Iterator[None]:
    """Inside this context an attention gets other angles."""

    def hook(_m: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        pair = kwargs.get("position_embeddings")
        return (args, kwargs | {"position_embeddings": f(kwargs, pair)}) if pair is not None else None

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
