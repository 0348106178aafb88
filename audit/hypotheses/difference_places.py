"""Where a difference sits, before anything is tried that explains it. It needs no model.

A token is odd if it differs by far more than the others do. If most odd tokens are of one class, and most
tokens of this class are odd, then the class is where the difference sits: the end token, every k-th token,
the tokens from a place on, one id, unlikely tokens, some lines. Of a wrong number only those tokens of a
class count that it would make odd: the end token may have been likely, and then 0 is nearly right.

Shapes: C completion tokens.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .evidence import Evidence
from .judgement import (
    ALIKE,
    CLASSES,
    FEWEST_ODD,
    FP32,
    MOST_ODD,
    ODD,
    ODD_LINE,
    ODD_LINES,
    SAME_LINES,
)
from .noise import Noise, weight
from .scorable_lines import Line

_PERIODS = range(2, 129)
# Lines of a batch.
_BATCHES = (4, 8, 16, 32, 64)

Masks = list[np.ndarray]  # of each line, [C] bool


@dataclass(frozen=True)
class Where:
    """The class of tokens in which a difference sits."""

    words: str
    tokens: int
    odd: int  # of them, those that differ by far more than the others
    odd_elsewhere: int


def where(evidence: Evidence, noise: Noise | None) -> Where | None:
    """Where the difference sits; None where it is everywhere, or in no class."""
    odd = odd_tokens(evidence, noise)
    for known in alike_classes(odd, known_classes(evidence, odd)):
        both = int((known.flat & np.concatenate(odd)).sum())
        return Where(known.words, int(known.flat.sum()), both, count(odd) - both)
    return None


def odd_tokens(evidence: Evidence, noise: Noise | None = None) -> Masks:
    """The tokens that differ by far more than rounding, or than most others do."""
    usual = usual_difference(evidence)
    usual = min(usual, noise.size) if noise else usual
    return [is_odd(x, x.logged, usual) for x in evidence.lines]


def usual_difference(evidence: Evidence) -> float:
    """The usual difference, in nats over the weight of a token: of the least odd quarter of the tokens.

    2.5 times the first quartile of a normal distribution's |x| is its mean |x|.
    """
    sizes = np.concatenate([_sizes(line, line.logged) for line in evidence.lines])
    return 2.5 * float(np.nanquantile(sizes, 0.25)) + FP32


def is_odd(line: Line, numbers: np.ndarray, usual: float) -> np.ndarray:
    """Which tokens would be odd with these numbers in the log, [C] bool."""
    with np.errstate(invalid="ignore"):
        return _sizes(line, numbers) > ODD * usual


def _sizes(line: Line, numbers: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.abs(numbers.astype(np.float64) - line.scored) / weight(line.scored)


def count(masks: Masks) -> int:
    """How many tokens are marked."""
    return sum(int(m.sum()) for m in masks)


def are_some(odd: Masks) -> bool:
    """Whether the odd tokens are neither too few nor too many to be of a class."""
    return FEWEST_ODD <= count(odd) <= MOST_ODD * sum(map(len, odd))


def has_odd_tokens(evidence: Evidence) -> bool:
    """Whether there are odd tokens at all, and not everywhere."""
    return are_some(odd_tokens(evidence))


class Class(NamedTuple):
    """Tokens that have something in common, in words."""

    words: str
    masks: Masks
    flat: np.ndarray  # of all lines, one after the other


def known_classes(evidence: Evidence, odd: Masks) -> list[Class]:
    """The classes in which the odd tokens may be; none where these are too few or too many."""
    if not are_some(odd):
        return []
    return [Class(words, masks, np.concatenate(masks)) for words, masks in _candidates(evidence, odd)]


def alike_classes(odd: Masks, classes: Sequence[Class], able: Masks | None = None) -> list[Class]:
    """The classes that are like the odd tokens, the most alike first. able: the tokens that can be odd."""
    are_odd = np.concatenate(odd)
    count, can = int(are_odd.sum()), True if able is None else np.concatenate(able) | are_odd
    rated = []
    for known in classes:
        inside = known.flat & can
        alike = 2.0 * int((inside & are_odd).sum()) / (int(inside.sum()) + count)
        if alike >= ALIKE:
            rated.append((alike, known))
    rated.sort(key=lambda x: -x[0])
    return [known for _, known in rated[:CLASSES]]


def _candidates(evidence: Evidence, odd: Masks) -> Iterator[tuple[str, Masks]]:
    lines = evidence.lines
    places = [np.arange(len(x.completion_ids)) for x in lines]
    ids = [np.array(x.completion_ids) for x in lines]
    yield "the first token of each completion", [p == 0 for p in places]
    last = Counter(x.completion_ids[-1] for x in lines)
    end, often = last.most_common(1)[0]
    if often > 1:
        yield f"the end token (id {end})", [x == end for x in ids]
    yield "the last token of each completion", [p == len(p) - 1 for p in places]
    odd_ids = Counter(np.concatenate([x[o] for x, o in zip(ids, odd, strict=True)]).tolist())
    for token, times in odd_ids.most_common(3):
        if times >= FEWEST_ODD and token != end:
            yield f"the token {token}", [x == token for x in ids]
    if evidence.scorer is not None:
        special = list(evidence.scorer.tokenizer.special_ids)
        yield "the special tokens", [np.isin(x, special) for x in ids]
    yield from _periodic(places, odd, "completion")
    yield from _from_a_place(places, odd, "completion")
    in_sequence = [len(x.prompt_ids) + p for x, p in zip(lines, places, strict=True)]
    if len({len(x.prompt_ids) for x in lines}) > 1:
        yield from _periodic(in_sequence, odd, "sequence")
        yield from _from_a_place(in_sequence, odd, "sequence")
    yield from _unlikely(lines, odd)
    whole = [bool(o.mean() > ODD_LINE) for o in odd]
    if 0 < sum(whole) < len(lines):
        yield line_words(whole, lines), [np.full(len(p), w) for p, w in zip(places, whole, strict=True)]


def _periodic(places: Masks, odd: Masks, whole: str) -> Iterator[tuple[str, Masks]]:
    """Every k-th token, for the k and the first place that the odd tokens have in common."""
    indices = np.concatenate([p[o] for p, o in zip(places, odd, strict=True)])
    for k in _PERIODS if len(np.unique(indices)) > 1 else ():
        counts = np.bincount(indices % k)
        if counts[first := int(counts.argmax())] >= ALIKE * len(indices):
            in_sequence = " of a sequence" if whole == "sequence" else ""
            words = f"every {_nth(k)} token{in_sequence}, from place {first} on"
            yield words, [p % k == first for p in places]


def _nth(k: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{k}{'th' if k % 100 in (11, 12, 13) else endings.get(k % 10, 'th')}"


def _from_a_place(places: Masks, odd: Masks, whole: str) -> Iterator[tuple[str, Masks]]:
    """The tokens from a place on, for places where the odd tokens of a line begin."""
    starts = [int(p[np.flatnonzero(o)[0]]) for p, o in zip(places, odd, strict=True) if o.any()]
    for start in sorted({int(np.quantile(starts, q)) for q in (0.0, 0.1, 0.25, 0.5)} - {0}):
        yield f"the tokens from place {start} of a {whole} on", [p >= start for p in places]


def _unlikely(lines: Sequence[Line], odd: Masks) -> Iterator[tuple[str, Masks]]:
    """The tokens below a probability that nearly all odd tokens are below."""
    scored = np.concatenate([x.scored[o] for x, o in zip(lines, odd, strict=True)])
    most = float(np.quantile(scored[np.isfinite(scored)], 0.95)) if np.isfinite(scored).any() else 0.0
    if most < math.log(0.5):
        with np.errstate(invalid="ignore"):
            yield f"the tokens of a probability below {math.exp(most):.2g}", [x.scored <= most for x in lines]


def line_words(whole: Sequence[bool], lines: Sequence[Line]) -> str:
    """Which lines are odd: those of a weight version, of some prompts, every k-th, long ones, or some."""
    odd = [x for x, w in zip(lines, whole, strict=True) if w]
    sound = [x for x, w in zip(lines, whole, strict=True) if not w]
    words = f"{len(odd)} of {len(lines)} lines"
    listed = f"{', '.join(str(x.index + 1) for x in odd[:6])}{', ...' if len(odd) > 6 else ''}"
    # So few lines are alike by chance in something.
    if len(odd) < ODD_LINES or len(sound) < ODD_LINES:
        return f"{words} ({listed})"
    for name, key in (("weight version", "version"), ("step", "step"), ("turn", "turn")):
        value, _ = Counter(getattr(x, key) for x in odd).most_common(1)[0]
        if value is not None and _are_those(odd, lines, lambda x, key=key, v=value: getattr(x, key) == v):
            return f"{words}, all those of {name} {value}"
    prompts = {x.prompt_ids for x in odd}
    if len(prompts) < len(odd) and _are_those(odd, lines, lambda x: x.prompt_ids in prompts):
        many = len(prompts) > 1
        return f"{words}, all those of {len(prompts)} prompt{'s' * many} ({listed})"
    if period := _period(odd, lines):
        return f"{words}, every {_nth(period[0])} from line {period[1] + 1} on"
    for name, length in _LENGTHS:
        if (least := min(map(length, odd))) > max(map(length, sound)):
            return f"{words}, all those with {name} of {least} tokens or more"
    if block := _block(odd, lines):
        return f"{words}, {block}"
    return f"{words} ({listed})"


def _block(odd: Sequence[Line], lines: Sequence[Line]) -> str:
    """The lines from the first odd one to the last, or a batch, that the odd ones are; empty for neither."""
    first, last = odd[0].index, odd[-1].index
    if _are_those(odd, lines, lambda x: first <= x.index <= last):
        return f"from line {first + 1} to line {last + 1}"
    for size in _BATCHES:
        batch, _ = Counter(x.index // size for x in odd).most_common(1)[0]
        if _are_those(odd, lines, lambda x, n=size, b=batch: x.index // n == b):
            return f"nearly all from line {batch * size + 1} to line {(batch + 1) * size}, a batch of {size}"
    return ""


def _are_those(odd: Sequence[Line], lines: Sequence[Line], test: Callable[[Line], bool]) -> bool:
    """Whether the odd lines are those of a test, but for a few: a line may be at fault and show little."""
    return _f1(odd, lines, test) >= SAME_LINES


def _f1(odd: Sequence[Line], lines: Sequence[Line], test: Callable[[Line], bool]) -> float:
    return 2.0 * sum(map(test, odd)) / (len(odd) + sum(map(test, lines)))


def _period(odd: Sequence[Line], lines: Sequence[Line]) -> tuple[int, int] | None:
    """The largest k, and the first line, for which every k-th line is odd; None for none.

    Of all lines only some are known, so a smaller k may look as good.
    """
    best, period = SAME_LINES, None
    for k in range(2, 65):
        first, often = Counter(x.index % k for x in odd).most_common(1)[0]
        alike = _f1(odd, lines, lambda x, k=k, first=first: x.index % k == first)
        if often >= ODD_LINES and alike >= best:
            best, period = alike, (k, first)
    return period


_LENGTHS: tuple[tuple[str, Callable[[Line], int]], ...] = (
    ("a completion", lambda x: len(x.completion_ids)),
    ("a prompt", lambda x: len(x.prompt_ids)),
    ("prompt and completion", lambda x: len(x.prompt_ids) + len(x.completion_ids)),
)
