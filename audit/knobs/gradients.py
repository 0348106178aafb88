"""How each token's log-probability moves where an operation's output moves a little: one backward a token.

A free change of an output y has some numbers. The slope of a token's score in each of them is a feature:

    channels   y_c (1 + a_c), of wide outputs by neighbours together           sum over t of y g
    weight     (W + A) x                 sum over t of g x^T, sketched: S1 g (S2 x)^T
    prompts    y (1 + a), of the prompt's tokens and of the completion's       sum over these t of y g
    places     y (1 + a_i), of the i-th eight tokens                           the same
    token i    of embeddings: y + a      sum over t of that id of g, sketched
    distances, keys, blocks, heads
               of attention: log-scores + a, scores (1 + b), values (1 + c), by the distance that is read, by
               the place that is read, by this modulo 16, or by the head that reads
    frequencies, positions
               of the rotation: its angles + a_j t, of each frequency; + a_i times the frequency, of the i-th
               eight tokens

with g = d score / d y. A change of all layers has the sum of their features. Only outputs that have a row for
each token are changed, of modules that run once.

Shapes: C completion tokens of a line, T its tokens, D width of an output, H heads, F features.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ...kernels.truncation import scaled_logits
from ..engines.module_trace import first_tensor
from ..hypotheses.scorable_lines import Line
from .knob import PRODUCTS
from .module_places import Places

Tensor = torch.Tensor
# Channels of an output up to which each has a number; more share them. Rows and columns of a sketch, and the
# numbers of a token's embedding.
_CHANNELS, _SKETCH, _OF_TOKEN = 128, 12, 48
# Tokens that share a number; the period of a cache's blocks; ids that are looked at, each in so many lines.
EIGHT, BLOCK, _IDS, _LINES = 8, 16, 40, 3
# Bytes of the gradients that a batched backward holds at most.
_BYTES = 1 << 28


@dataclass(frozen=True)
class Change:
    """A free change: of an operation in a layer (-1 for what is in none), in one of the forms above."""

    operation: str
    layer: int
    form: str
    width: int = field(default=0, compare=False)  # channels of the output

    @property
    def each(self) -> int:
        """The neighbouring channels that share a number."""
        return max(1, -(-self.width // _CHANNELS))


# Forms whose features are three blocks: log-scores, scores, values.
OF_READS = ("distances", "keys", "blocks", "heads")
Features = dict[Change, np.ndarray]  # [C, F]


@dataclass(frozen=True)
class Gradients:
    """The features of the changes of a model, line by line. longest: tokens of the longest line."""

    model: torch.nn.Module
    places: Places
    ids: tuple[int, ...]
    longest: int

    def features(self, line: Line) -> Features:
        """Those of a line's completion tokens."""
        ids = torch.tensor([[*line.prompt_ids, *line.completion_ids[:-1]]], device=self.model.device)
        with torch.enable_grad(), _Seen(self.places, ids.shape[1]) as seen:
            z = self.model(ids, use_cache=False).logits[0, len(line.prompt_ids) - 1 :].float()
            z = scaled_logits(z, line.params) if line.params else z
            drawn = torch.tensor(line.completion_ids, device=z.device).unsqueeze(1)
            scores = torch.log_softmax(z, -1).gather(1, drawn).squeeze(1)
            rows: dict[Change, list[Tensor]] = {}
            for gradients in _backward(scores, seen.outputs()):
                for change, x in self._changes(seen, gradients, line, ids[0]):
                    rows.setdefault(change, []).append(x)
        return {change: torch.cat(x).cpu().numpy() for change, x in rows.items()}

    def _changes(
        self, seen: "_Seen", gradients: Sequence[Tensor | None], line: Line, ids: Tensor
    ) -> Iterator[tuple[Change, Tensor]]:
        """The features [C, F] of a chunk of tokens. gradients: [C, ...] of each output, of its shape."""
        by_output = dict(zip(seen.outputs(), gradients, strict=True))
        prompt = len(line.prompt_ids)
        for (kind, layer), (x, y) in seen.modules.items():
            g = by_output[y]
            if g is None:
                continue
            T = len(ids)
            g, rows = g.reshape(len(g), T, -1), y.detach().reshape(T, -1)
            moved = g * rows
            channels = Change(kind, layer, "channels", rows.shape[1])
            yield channels, _grouped(moved.sum(1), channels.each)
            along = moved.sum(-1)  # [C, T]
            halves = torch.stack([along[:, :prompt].sum(1), along[:, prompt:].sum(1)], 1)
            yield Change(kind, layer, "prompts"), halves
            yield Change(kind, layer, "places"), _summed(along, self._eights(T), self._count)
            if x is not None and kind in self._matrices and _has_rows(x, T) and x.dim() < 4:
                yield Change(kind, layer, "weight"), _sketched(g, x.reshape(T, -1))
            if layer == -1 and kind in self._embeddings:
                for i in self.ids:
                    here = (ids == i).to(g.dtype)
                    token = torch.einsum("ctd,t->cd", g, here)
                    yield Change(kind, layer, f"token {i}"), token @ _signs(token.shape[1], _OF_TOKEN, g)
        for kind, pair in seen.angles.items():
            if len(pair) == 2 and all(by_output[x] is not None for x in pair):
                yield from self._angles(kind, *pair, *(by_output[x][:, 0] for x in pair))
        for layer, (s, out, p, v) in seen.products.items():
            if by_output[s] is not None and by_output[out] is not None:
                yield from self._reads(
                    layer, by_output[s][:, 0], by_output[out][:, 0], s.detach()[0], p[0], v[0]
                )

    def _angles(
        self, kind: str, cos: Tensor, sin: Tensor, g_cos: Tensor, g_sin: Tensor
    ) -> Iterator[tuple[Change, Tensor]]:
        """Other angles, of cos and sin [1, T, D] that hold each frequency twice; of others none."""
        cos, sin = cos.detach()[0], sin.detach()[0]
        pair = _pairs(cos)
        if pair is None or len(cos) < 2:
            return
        turned = g_sin * cos - g_cos * sin
        T, (one, other) = turned.shape[1], pair
        turned = turned[..., one] + turned[..., other]  # [C, T, D / 2]
        # An angle grows by its frequency with each token: at place 1 it is the frequency.
        speed = torch.atan2(sin[1], cos[1])[one]
        yield Change(kind, -1, "frequencies"), torch.einsum("ctd,t->cd", turned, torch.arange(T).to(turned))
        yield Change(kind, -1, "positions"), _summed(turned @ speed, self._eights(T), self._count)

    def _reads(
        self, layer: int, gs: Tensor, go: Tensor, s: Tensor, p: Tensor, v: Tensor
    ) -> Iterator[tuple[Change, Tensor]]:
        """Changes of what attention reads. gs: [C, H, T, T], go: [C, H, T, D] of what the values give."""
        T = s.shape[-1]
        seen = torch.ones(T, T, dtype=torch.bool, device=s.device).tril()
        added = torch.where(seen, gs, torch.zeros_like(gs))
        parts = (
            added,
            torch.where(seen, gs * s, torch.zeros_like(gs)),
            torch.einsum("chtd,hud->chtu", go, v) * p,
        )
        here, there = torch.arange(T)[:, None], torch.arange(T)[None].expand(T, T)
        far = (here - there).clamp(min=0)
        indices = {
            "distances": torch.where(far > 0, far.float().clamp(min=1).log2().floor().long() + 1, 0),
            "keys": there // EIGHT + 1,
            "blocks": there % BLOCK,
        }
        indices["keys"] = torch.where(there == 0, 0, indices["keys"])
        for form, index in indices.items():
            count = BLOCK if form == "blocks" else self._count + 1
            index = index.flatten().clamp(max=count - 1).to(s.device)
            blocks = [_summed(x.sum(1).flatten(1), index, count) for x in parts]
            yield Change("attention", layer, form), torch.cat(blocks, 1)
        yield Change("attention", layer, "heads"), torch.cat([x.sum((-1, -2)) for x in parts], 1)

    @property
    def _count(self) -> int:
        return -(-self.longest // EIGHT)

    def _eights(self, T: int) -> Tensor:
        return (torch.arange(T) // EIGHT).to(self.model.device)

    @cached_property
    def _matrices(self) -> set[str]:
        return {x.kind for x in self.places.modules if x.is_matrix and x.kind != self.places.lm_head}

    @cached_property
    def _embeddings(self) -> set[str]:
        return {
            x.kind
            for x in self.places.modules
            if x.is_embedding and x.weight.shape[0] > max(self.ids, default=0)
        }


def gradients_of(model: torch.nn.Module, places: Places, lines: Sequence[Line]) -> Gradients:
    """The gradients of some lines: of the ids that most of them have, and as long as the longest."""
    counts = Counter(i for x in lines for i in {*x.prompt_ids, *x.completion_ids[:-1]})
    ids = tuple(i for i, n in counts.most_common(_IDS) if n >= _LINES)
    longest = max(len(x.prompt_ids) + len(x.completion_ids) for x in lines)
    return Gradients(model, places, ids, longest)


def _backward(scores: Tensor, outputs: list[Tensor]) -> Iterator[list[Tensor | None]]:
    """The gradients of scores [C], a chunk at a time: of each output, with a dimension of C before."""
    each = max(1, _BYTES // max(1, sum(x.nbytes for x in outputs)))
    for rows in torch.eye(len(scores), device=scores.device).split(each):
        yield torch.autograd.grad(
            scores, outputs, rows, retain_graph=True, is_grads_batched=True, allow_unused=True
        )


def _has_rows(y: Tensor, T: int) -> bool:
    """Whether an output has a row for each of T tokens: [1, T, ...], or [T, D] as experts have."""
    return y.shape[:2] == (1, T) if y.dim() > 2 else y.dim() == 2 and len(y) == T


def _pairs(cos: Tensor) -> tuple[slice, slice] | None:
    """The two columns of each frequency in cos [T, D]: halves or neighbours; None where it is neither."""
    half = cos.shape[-1] // 2
    forms = (slice(0, half), slice(half, None)), (slice(0, None, 2), slice(1, None, 2))
    if cos.shape[-1] % 2:
        return None
    return next((x for x in forms if torch.equal(cos[..., x[0]], cos[..., x[1]])), None)


def _summed(x: Tensor, index: Tensor, count: int) -> Tensor:
    """[C, N] summed to [C, count] by the index [N] of each column."""
    return x.new_zeros(len(x), count).index_add_(1, index, x)


def _grouped(x: Tensor, each: int) -> Tensor:
    """[C, D] summed over so many neighbours."""
    index = torch.arange(x.shape[1], device=x.device) // each
    return x if each == 1 else _summed(x, index, -(-x.shape[1] // each))


def _signs(rows: int, columns: int, like: Tensor) -> Tensor:
    """Signs by chance [rows, columns]: a sketch keeps the products of features, on average."""
    draws = torch.Generator().manual_seed(rows)
    signs = torch.randint(0, 2, (rows, columns), generator=draws).to(like) * 2 - 1
    return signs / columns**0.5


def _sketched(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of a weight, g^T x [C, D, K], as a sketch [C, F]."""
    small = torch.einsum(
        "cta,tb->cab", g @ _signs(g.shape[-1], _SKETCH, g), x.detach() @ _signs(x.shape[-1], _SKETCH, g)
    )
    return small.flatten(1)


class _Seen(TorchFunctionMode):
    """What the modules and the products of attention gave in one forward of one sequence, with its graph."""

    def __init__(self, places: Places, T: int):
        super().__init__()
        self._places, self._tokens, self._handles = places, T, []
        self._ran: set[tuple[str, int]] = set()
        self._now: list[int] = []  # the layer whose attention runs, and its products so far
        self.modules: dict[tuple[str, int], tuple[Tensor | None, Tensor]] = {}
        self.products: dict[int, tuple[Tensor, ...]] = {}
        self.angles: dict[str, tuple[Tensor, ...]] = {}

    def outputs(self) -> list[Tensor]:
        """Those whose gradients are wanted, the logits' not among them."""
        products = [x for p in self.products.values() for x in p[:2]]
        angles = [x for pair in self.angles.values() for x in pair]
        return [y for _, y in self.modules.values()] + products + angles

    def __enter__(self) -> "_Seen":
        for place in self._places.modules:
            if place.kind != self._places.lm_head:
                for layer, module in place.modules.items():
                    self._handles.append(module.register_forward_hook(self._keep((place.kind, layer))))
        for place in self._places.rotations[:1]:
            self._handles.append(place.first.register_forward_hook(self._keep_angles(place.kind)))
        for layer, module in self._places.attention[0].modules.items() if self._places.attention else ():
            before = module.register_forward_pre_hook(
                lambda *_, i=layer: self._now.__setitem__(slice(None), [i, 0])
            )
            self._handles += [before, module.register_forward_hook(lambda *_: self._now.clear())]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _keep(self, key: tuple[str, int]) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, args: tuple, out: Any) -> None:
            y = first_tensor(out)
            if key in self._ran:
                self.modules.pop(key, None)  # one run is a part of what it does
                return
            self._ran.add(key)
            if y is None or not _has_rows(y, self._tokens):
                return
            self.modules[key] = first_tensor(args), y if y.requires_grad else y.requires_grad_()

        return hook

    def _keep_angles(self, kind: str) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _args: tuple, out: Any) -> None:
            if isinstance(out, tuple) and len(out) == 2:
                self.angles[kind] = tuple(x if x.requires_grad else x.requires_grad_() for x in out)

        return hook

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if self._now and function in PRODUCTS and out.dim() == 4:
            self._now[1] += 1
            layer, products = self._now
            if products == 1:
                self.products[layer] = (out,)
            elif products == 2:
                self.products[layer] = (*self.products[layer], out, args[0].detach(), args[1].detach())
        return out
