"""Where a difference enters a model, by free changes of each operation (gradients.py).

Each change is fitted to the lines of most prompts and explains the squares of the others:

    r ~ J a,   a = (J^T J + l)^-1 J^T r,   share = 1 - sum (r - J a)^2 / sum r^2 of the prompts left out

r, J: the difference and the slopes, over w of noise.py. The ridge l is the best of a few. A change is linear,
so of a large difference it explains a part only. An operation is told as the place where its change explains
most of the difference and leaves little of it, where each other operation's leaves clearly more, prompt by
prompt, and where no change explains as much of shuffled numbers. Else the nearest are listed.

Prompts are what is left out, counted and shuffled: completions of one prompt begin alike, so a token's equal
would stand among those that a change is fitted to.

Shapes: N tokens, F numbers of a change, R columns of numbers, the first one r, the others shuffled.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..hypotheses.tried import Entry
from .gradients import BLOCK, EIGHT, OF_READS, Change, Features

# Shares of the tokens' squares, over the mean square of a change, that a ridge holds back; prompts are left
# out in so many parts; shuffles of the numbers.
_RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_PARTS, _SHUFFLES = 6, 4
# Times the root mean square from which a token counts no more.
_OUTLIER = 6.0
# Set on 27 plants of strange.py and stranger.py (benchmarks/audit_cases): docs/audit/found.md has figures.
# In their order: the share that a place explains at least; times the noise that it leaves at most; times what
# another operation leaves that it leaves at most; the errors over prompts of that; and times the share that
# changes explain of shuffled numbers.
_SHARE, _LEAVES, _CLEARLY, _ERRORS, _CHANCE = 0.5, 3.0, 0.6, 2.5, 3.0
# What a place explains at least to be listed. Of twelve roundings to bf16 alone the best one explained 0.04
# to 0.15.
_LISTED = 0.2
# What the layer that is told leaves at most, times what another layer, or all, leave.
_LAYERS = 0.85
# Parts of a change that are told alone: they explain so much of the whole, and are so many at most.
_MOST_OF, _FEW = 0.9, 8
FEWEST_PROMPTS = 5
ALL = -2  # layers


@dataclass(frozen=True)
class _Fit:
    """A change that was fitted. left: [N], of r left out. shuffled: the best share of shuffled r."""

    change: Change
    share: float
    left: np.ndarray
    shuffled: float


@dataclass(frozen=True)
class Difference:
    """A difference r [N], the number of each token's prompt [N], and what rounding leaves on average."""

    r: np.ndarray
    prompts: np.ndarray
    noise: float

    def entry(self, features: Mapping[Change, np.ndarray]) -> Entry | None:
        """Where it enters; None of too few prompts, and where no place explains more than of rounding."""
        r = np.nan_to_num(self.r)
        most = _OUTLIER * float(np.sqrt((r * r).mean()))
        if not most or len(np.unique(self.prompts)) < FEWEST_PROMPTS:
            return None
        clipped = replace(self, r=np.clip(r, -most, most))
        numbers = np.stack([clipped.r, *clipped._shuffled()], 1)
        changes = ((change, x) for change, x in _with_all_layers(features) if np.isfinite(x).all())
        fits = [clipped._fit(change, x, numbers) for change, x in changes]
        fits.sort(key=lambda x: -x.share)
        return clipped._judged(fits, features) if fits and fits[0].share >= _LISTED else None

    def _shuffled(self) -> Iterator[np.ndarray]:
        """The numbers of each prompt in another one's place, cut or repeated to its length, [N] each time."""
        draws, masks = np.random.default_rng(0), list(self._masks())
        for _ in range(_SHUFFLES):
            order, r = draws.permutation(len(masks)), np.empty_like(self.r)
            for here, there in zip(order, np.roll(order, 1), strict=True):
                r[masks[here]] = np.resize(self.r[masks[there]], masks[here].sum())
            yield r

    def _fit(self, change: Change, features: np.ndarray, numbers: np.ndarray) -> _Fit:
        J = _scaled(features, change.form)
        left = self._left(J, numbers)  # [ridges, N, R]
        shares = 1.0 - (left**2).sum(1) / np.maximum((numbers**2).sum(0), 1e-30)
        best = int(shares[:, 0].argmax())
        return _Fit(change, float(shares[best, 0]), left[best, :, 0], float(shares[:, 1:].max()))

    def _left(self, J: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """What each ridge leaves of the numbers in prompts that it was not fitted to, [ridges, N, R]."""
        left = np.empty((len(_RIDGES), *numbers.shape))
        whole, both = J.T @ J, J.T @ numbers
        prompts = np.unique(self.prompts)
        for part in range(min(_PARTS, len(prompts))):
            out = np.isin(self.prompts, prompts[part::_PARTS])
            x, y = J[out], numbers[out]
            values, vectors = np.linalg.eigh(whole - x.T @ x)
            turned, x = vectors.T @ (both - x.T @ y), x @ vectors
            for i, ridge in enumerate(_RIDGES):
                left[i, out] = y - x @ (turned / (np.maximum(values, 0.0) + ridge)[:, None])
        return left

    def _judged(self, fits: Sequence[_Fit], features: Mapping[Change, np.ndarray]) -> Entry:
        """The best fit beside the best one of another operation."""
        best = fits[0]
        other = next((x for x in fits if x.change.operation != best.change.operation), best)
        by_chance = max(x.shuffled for x in fits)
        told = (
            best.share >= max(_SHARE, _CHANCE * by_chance)
            and float(np.abs(best.left).mean()) <= _LEAVES * self.noise
            and 1.0 - best.share <= _CLEARLY * (1.0 - other.share)
            and self._errors(best, other) >= self._errors_needed()
        )
        part = self._part(best, features)
        words = f"{_words(best.change)}{part}{self._layers(best, fits)}".rstrip(",")
        next_words = f"{_words(other.change)}{_layer_words([other.change.layer])}".rstrip(",")
        return Entry(words, best.share, next_words, other.share, by_chance, bool(told))

    def _errors(self, best: _Fit, other: _Fit) -> float:
        """By how many standard errors over prompts a fit leaves less than another one."""
        less = np.array([float((other.left[x] ** 2 - best.left[x] ** 2).sum()) for x in self._masks()])
        error = float(less.std(ddof=1)) / np.sqrt(len(less))
        return float(less.mean()) / error if error else 0.0

    def _errors_needed(self) -> float:
        """_ERRORS of a normal number as those of Student's t, whose error is of few prompts itself.

        The first terms of Cornish and Fisher's series (Abramowitz and Stegun, 26.7.5).
        """
        z, n = _ERRORS, len(np.unique(self.prompts)) - 1
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + third

    def _masks(self) -> Iterator[np.ndarray]:
        return (self.prompts == i for i in np.unique(self.prompts))

    def _layers(self, best: _Fit, fits: Sequence[_Fit]) -> str:
        """The layers of a fit, and others that the same change may be in."""
        same = [
            x.change.layer
            for x in fits
            if (x.change.operation, x.change.form) == (best.change.operation, best.change.form)
            and 1.0 - best.share > _LAYERS * (1.0 - x.share)
        ]
        return _layer_words(list(dict.fromkeys([best.change.layer, *same])))

    def _part(self, fit: _Fit, features: Mapping[Change, np.ndarray]) -> str:
        """The few parts of a change that explain nearly all that it does, in words; empty where most do."""
        change = fit.change
        if change.form == "weight" or change.form.startswith("token"):
            return ""  # a sketch has no parts
        J = _scaled(_summed(features, change) if change.layer == ALL else features[change], change.form)
        groups = _groups(change.form, J.shape[1])
        count = int(groups.max()) + 1
        ridge = np.eye(J.shape[1])
        a = np.linalg.solve(J.T @ J + ridge, J.T @ self.r)
        sizes = [float(np.linalg.norm(J[:, groups == i] @ a[groups == i])) for i in range(count)]
        order = np.argsort(sizes)[::-1]
        for n in range(1, min(_FEW, count // 2) + 1):
            kept = np.isin(groups, order[:n])
            left = self._left(J[:, kept], self.r[:, None])
            if 1.0 - (left**2).sum(1).min() / (self.r**2).sum() >= _MOST_OF * fit.share:
                return _part_words(change, sorted(map(int, order[:n])))
        return ""


def _with_all_layers(features: Mapping[Change, np.ndarray]) -> Iterator[tuple[Change, np.ndarray]]:
    """The changes, and each in all layers: of small changes the features add up."""
    yield from features.items()
    kinds: dict[Change, list[Change]] = {}
    for change in features:
        if change.layer >= 0:
            kinds.setdefault(replace(change, layer=ALL), []).append(change)
    for kind, changes in kinds.items():
        if len(changes) > 1 and len({features[x].shape for x in changes}) == 1:
            yield kind, _summed(features, kind)


def _summed(features: Mapping[Change, np.ndarray], kind: Change) -> np.ndarray:
    """The features of a change of all layers."""
    layers = (x for change, x in features.items() if replace(change, layer=ALL) == kind and change.layer >= 0)
    total = next(layers).copy()
    for x in layers:
        total += x
    return total


def _scaled(x: np.ndarray, form: str) -> np.ndarray:
    """Features whose mean square of a token is 1, and that of each of the three ways to read alike."""
    parts = np.split(x.astype(np.float64), 3, axis=1) if form in OF_READS else [x.astype(np.float64)]
    return np.concatenate([p / (np.sqrt((p * p).sum(1).mean()) + 1e-30) for p in parts], axis=1)


def _groups(form: str, count: int) -> np.ndarray:
    """The part that each number of a change belongs to, [F]."""
    return np.tile(np.arange(count // 3), 3) if form in OF_READS else np.arange(count)


# --- words ---


def _words(change: Change) -> str:
    """An operation and the form of its change."""
    output = f"the output of {change.operation}, or where it is read"
    forms = {
        "channels": f"{output}, channel by channel,",
        "weight": f"the weight of {change.operation}",
        "prompts": f"{output}, otherwise in prompts than in completions,",
        "places": f"{output}, place by place,",
        "distances": "attention, by the distance that is read,",
        "keys": "attention, by the place that is read,",
        "blocks": f"attention, by the place that is read modulo {BLOCK},",
        "heads": "attention, by its heads,",
        "frequencies": f"the rotation ({change.operation}), by its frequencies,",
        "positions": f"the rotation ({change.operation}), by the position of a token,",
    }
    return forms.get(change.form, f"{change.operation}, of {change.form}")


def _part_words(change: Change, parts: Sequence[int]) -> str:
    """Parts of a change, as a part of a sentence."""
    form, each = change.form, change.each
    last = [min(each * i + each, change.width) - 1 for i in parts]
    channels = [
        f"channels {each * i} to {x}" if x > each * i else f"channel {x}"
        for i, x in zip(parts, last, strict=True)
    ]
    places = [f"{EIGHT * i} to {EIGHT * i + EIGHT - 1}" for i in parts]
    read = ["the first" if i == 0 else f"{EIGHT * (i - 1)} to {EIGHT * i - 1}" for i in parts]
    far = ["the token itself" if i == 0 else f"{2 ** (i - 1)} to {2**i - 1} tokens back" for i in parts]
    slots = [f"{i}, {i + BLOCK}, {i + 2 * BLOCK}, ..." for i in parts]
    listed = {
        "channels": channels,
        "prompts": [f"the {'completion' if i else 'prompt'}" for i in parts],
        "frequencies": [f"frequency {i}" for i in parts],
        "places": [f"places {x}" for x in places],
        "positions": [f"places {x}" for x in places],
        "keys": [f"places {x}" for x in read],
        "distances": far,
        "blocks": [f"each {BLOCK}th place: {x}" for x in slots],
    }.get(form) or [f"{form.removesuffix('s')} {i}" for i in parts]
    return f" most of it by {' and '.join(listed)},"


def _layer_words(layers: Sequence[int]) -> str:
    """Layers that may be meant, as a part of a sentence."""
    if layers[0] == -1:
        return ""
    return " in " + " or ".join("all layers" if x == ALL else f"layer {x}" for x in layers)


def stacked(by_line: Sequence[Features]) -> dict[Change, np.ndarray]:
    """The features of several lines, of the changes that all of them have, [N, F]. The lines give them up."""
    shared = set.intersection(*map(set, by_line)) if by_line else set()
    changes = [x for x in by_line[0] if x in shared] if by_line else []
    return {x: np.concatenate([line.pop(x) for line in by_line]) for x in changes}
