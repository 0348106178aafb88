"""Where a difference sits, before any hypothesis, and which wrong numbers may stand there.

It needs no model.

A token is odd if it differs by far more than the others do. If most odd tokens are of one class, and most
tokens of this class are odd, then the class is where the difference sits: the end token, every k-th token,
the tokens from a place on, one id, some lines.

Shapes: C completion tokens.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .evidence import Evidence, Line, Scores
from .noise import FP32, Noise, weight
from .prediction import Prediction

# Times the usual difference from which a token is odd; the fewest odd ones; and the most, as a share.
_ODD, _FEWEST, _MOST = 8.0, 4, 0.6
# The least F1 of odd tokens and a class, and the classes that numbers are tried at.
_ALIKE, _CLASSES = 0.75, 3
# A line is odd if this share of its tokens is.
_LINE = 0.5
_PERIODS = range(2, 129)
_EARLIER = range(1, 9)

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
    for words, masks in _classes(evidence, odd):
        inside = sum(int(m.sum()) for m in masks)
        both = sum(int((m & o).sum()) for m, o in zip(masks, odd, strict=True))
        return Where(words, inside, both, sum(int(o.sum()) for o in odd) - both)
    return None


def odd_tokens(evidence: Evidence, noise: Noise | None = None) -> Masks:
    """The tokens that differ by far more than rounding, or than most others do."""
    sizes = [_sizes(line) for line in evidence.lines]
    usual = 1.25 * float(np.nanmedian(np.concatenate(sizes))) + FP32
    usual = min(usual, noise.size) if noise else usual
    with np.errstate(invalid="ignore"):
        return [x > _ODD * usual for x in sizes]


def _sizes(line: Line) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.abs(line.logged.astype(np.float64) - line.scored) / weight(line.scored)


def _classes(evidence: Evidence, odd: Masks) -> list[tuple[str, Masks]]:
    """The classes that are like the odd tokens, the most alike first."""
    count, tokens = sum(int(o.sum()) for o in odd), sum(len(o) for o in odd)
    if not _FEWEST <= count <= _MOST * tokens:
        return []
    rated = []
    for words, masks in _candidates(evidence, odd):
        both = sum(int((m & o).sum()) for m, o in zip(masks, odd, strict=True))
        alike = 2.0 * both / (sum(int(m.sum()) for m in masks) + count)
        if alike >= _ALIKE:
            rated.append((alike, words, masks))
    rated.sort(key=lambda x: -x[0])
    return [(words, masks) for _, words, masks in rated[:_CLASSES]]


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
        if times >= _FEWEST and token != end:
            yield f"the token {token}", [x == token for x in ids]
    yield from _periodic(places, odd)
    starts = [int(np.flatnonzero(o)[0]) for o in odd if o.any()]
    for start in sorted({int(np.quantile(starts, q)) for q in (0.0, 0.1, 0.25, 0.5)} - {0}):
        yield f"the tokens from place {start} of a completion on", [p >= start for p in places]
    whole = [bool(o.mean() > _LINE) for o in odd]
    if 0 < sum(whole) < len(lines):
        yield _line_words(whole, lines), [np.full(len(p), w) for p, w in zip(places, whole, strict=True)]


def _periodic(places: Masks, odd: Masks) -> Iterator[tuple[str, Masks]]:
    """Every k-th token, for the k and the first place that the odd tokens have in common."""
    at = np.concatenate([p[o] for p, o in zip(places, odd, strict=True)])
    for k in _PERIODS:
        first, often = Counter((at % k).tolist()).most_common(1)[0]
        if often >= _ALIKE * len(at) and len(set(at.tolist())) > 1:
            yield f"every {k}th token, from place {first} on", [p % k == first for p in places]


def _line_words(whole: Sequence[bool], lines: Sequence[Line]) -> str:
    """Which lines are odd: a prompt's, every k-th, or some."""
    odd = [x.index for x, w in zip(lines, whole, strict=True) if w]
    sound = [x.index for x, w in zip(lines, whole, strict=True) if not w]
    prompts = {x.prompt_ids for x, w in zip(lines, whole, strict=True) if w}
    rest = {x.prompt_ids for x, w in zip(lines, whole, strict=True) if not w}
    words = f"{len(odd)} of {len(lines)} lines"
    if len(odd) > 1:
        for k in range(2, 65):
            if len({i % k for i in odd}) == 1 and not any(i % k == odd[0] % k for i in sound):
                return f"{words}, every {k}th from line {odd[0] % k + 1} on"
    if prompts.isdisjoint(rest):
        return f"{words}, all those of {len(prompts)} prompts"
    return f"{words} ({', '.join(str(i + 1) for i in odd[:6])}{', ...' if len(odd) > 6 else ''})"


# --- the wrong numbers ---


def wrong_numbers(evidence: Evidence) -> Iterator[Prediction]:
    """Other numbers where the difference sits, and there alone."""
    for words, masks in _classes(evidence, odd_tokens(evidence)):
        for number, change in _numbers(evidence.lines):
            at_end = words.startswith(("the end", "the last"))
            if number == "0" and evidence.side == "sampler" and not at_end:
                continue  # tokens that were not drawn, which another hypothesis names
            scores = _changed(evidence, masks, change)
            yield Prediction(f"in {words} the sampler's number is {number}", scores)


def _changed(evidence: Evidence, masks: Masks, change: Callable[[int], np.ndarray]) -> Scores:
    """The scores with other numbers at some places; those that are unknown stay."""
    scores = {}
    for i, (line, mask) in enumerate(zip(evidence.lines, masks, strict=True)):
        new = change(i)
        scores[i] = np.where(mask & ~np.isnan(new), new, line.scored).astype(np.float32)
    return scores


def _numbers(lines: Sequence[Line]) -> Iterator[tuple[str, Callable[[int], np.ndarray]]]:
    """What a number may be in place of its token's own, in words, and [C] for a line."""
    yield "0", lambda i: np.zeros(len(lines[i].scored))
    yield "the next line's", lambda i: _as_long(lines[(i + 1) % len(lines)].scored, len(lines[i].scored))
    yield "the line's before", lambda i: _as_long(lines[i - 1].scored, len(lines[i].scored))
    for k in _EARLIER:
        yield f"that of an earlier token ({k} before)", lambda i, k=k: _moved(lines[i].scored, k)
        yield f"that of a later token ({k} after)", lambda i, k=k: _moved(lines[i].scored, -k)
    for base in (2, 10):
        yield f"a logarithm to the base {base}", lambda i, b=base: lines[i].scored / math.log(b)
    yield "the mean of the completion", lambda i: np.full(len(lines[i].scored), np.nanmean(lines[i].scored))


def _as_long(x: np.ndarray, n: int) -> np.ndarray:
    """x cut or filled with NaN to n numbers."""
    return np.concatenate([x[:n], np.full(max(n - len(x), 0), np.nan)])


def _moved(x: np.ndarray, by: int) -> np.ndarray:
    """x[i - by] at i; NaN where there is none."""
    moved = np.full(len(x), np.nan)
    if by >= len(x) or -by >= len(x):
        return moved
    if by > 0:
        moved[by:] = x[:-by]
    else:
        moved[:by] = x[-by:]
    return moved
