"""Where a difference sits, before any hypothesis, and which wrong numbers may stand there.

It needs no model; with one, likeliest.py tries more numbers.

A token is odd if it differs by far more than the others do. If most odd tokens are of one class, and most
tokens of this class are odd, then the class is where the difference sits: the end token, every k-th token,
the tokens from a place on, one id, unlikely tokens, some lines. Of a wrong number only those tokens of a
class count that it would make odd: the end token may have been likely, and then 0 is nearly right.

Shapes: C completion tokens.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .evidence import Evidence
from .lines import Line, Scores
from .noise import FP32, Noise, weight
from .prediction import Prediction

# Times the usual difference from which a token is odd; the fewest odd ones; and the most, as a share.
_ODD, _FEWEST, _MOST = 8.0, 4, 0.75
# The least F1 of odd tokens and a class, and the classes that numbers are tried at.
_ALIKE, _CLASSES = 0.75, 3
# A line is odd if this share of its tokens is; and the lines that must be alike in something.
_LINE, _LINES = 0.5, 3
# The least F1 of odd lines and those of a version, of some prompts, or every k-th one.
_SAME = 0.85
_PERIODS = range(2, 129)
# Lines of a batch.
_BATCHES = (4, 8, 16, 32, 64)
_EARLIER = range(1, 9)
# Of its difference, what a line keeps at most where other numbers come much nearer to it.
_MUCH = 0.2

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
    for known in _alike(odd, _known_classes(evidence, odd)):
        both = int((known.flat & np.concatenate(odd)).sum())
        return Where(known.words, int(known.flat.sum()), both, _count(odd) - both)
    return None


def odd_tokens(evidence: Evidence, noise: Noise | None = None) -> Masks:
    """The tokens that differ by far more than rounding, or than most others do."""
    usual = _usual(evidence)
    usual = min(usual, noise.size) if noise else usual
    return [_is_odd(x, x.logged, usual) for x in evidence.lines]


def _usual(evidence: Evidence) -> float:
    """The usual difference, in nats over the weight of a token: of the least odd quarter of the tokens.

    2.5 times the first quartile of a normal distribution's |x| is its mean |x|.
    """
    sizes = np.concatenate([_sizes(line, line.logged) for line in evidence.lines])
    return 2.5 * float(np.nanquantile(sizes, 0.25)) + FP32


def _is_odd(line: Line, numbers: np.ndarray, usual: float) -> np.ndarray:
    """Which tokens would be odd with these numbers in the log, [C] bool."""
    with np.errstate(invalid="ignore"):
        return _sizes(line, numbers) > _ODD * usual


def _sizes(line: Line, numbers: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.abs(numbers.astype(np.float64) - line.scored) / weight(line.scored)


def _count(masks: Masks) -> int:
    return sum(int(m.sum()) for m in masks)


def _are_some(odd: Masks) -> bool:
    """Whether the odd tokens are neither too few nor too many to be of a class."""
    return _FEWEST <= _count(odd) <= _MOST * sum(map(len, odd))


def has_odd_tokens(evidence: Evidence) -> bool:
    """Whether there are odd tokens at all, and not everywhere."""
    return _are_some(odd_tokens(evidence))


class Class(NamedTuple):
    """Tokens that have something in common, in words."""

    words: str
    masks: Masks
    flat: np.ndarray  # of all lines, one after the other


def _known_classes(evidence: Evidence, odd: Masks) -> list[Class]:
    """The classes in which the odd tokens may be; none where these are too few or too many."""
    if not _are_some(odd):
        return []
    return [Class(words, masks, np.concatenate(masks)) for words, masks in _candidates(evidence, odd)]


def _alike(odd: Masks, classes: Sequence[Class], able: Masks | None = None) -> list[Class]:
    """The classes that are like the odd tokens, the most alike first. able: the tokens that can be odd."""
    are_odd = np.concatenate(odd)
    count, can = int(are_odd.sum()), True if able is None else np.concatenate(able) | are_odd
    rated = []
    for known in classes:
        inside = known.flat & can
        alike = 2.0 * int((inside & are_odd).sum()) / (int(inside.sum()) + count)
        if alike >= _ALIKE:
            rated.append((alike, known))
    rated.sort(key=lambda x: -x[0])
    return [known for _, known in rated[:_CLASSES]]


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
    whole = [bool(o.mean() > _LINE) for o in odd]
    if 0 < sum(whole) < len(lines):
        yield _line_words(whole, lines), [np.full(len(p), w) for p, w in zip(places, whole, strict=True)]


def _periodic(places: Masks, odd: Masks, of: str) -> Iterator[tuple[str, Masks]]:
    """Every k-th token, for the k and the first place that the odd tokens have in common."""
    at = np.concatenate([p[o] for p, o in zip(places, odd, strict=True)])
    for k in _PERIODS if len(np.unique(at)) > 1 else ():
        counts = np.bincount(at % k)
        if counts[first := int(counts.argmax())] >= _ALIKE * len(at):
            of_sequence = " of a sequence" if of == "sequence" else ""
            words = f"every {_nth(k)} token{of_sequence}, from place {first} on"
            yield words, [p % k == first for p in places]


def _nth(k: int) -> str:
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{k}{'th' if k % 100 in (11, 12, 13) else endings.get(k % 10, 'th')}"


def _from_a_place(places: Masks, odd: Masks, of: str) -> Iterator[tuple[str, Masks]]:
    """The tokens from a place on, for places where the odd tokens of a line begin."""
    starts = [int(p[np.flatnonzero(o)[0]]) for p, o in zip(places, odd, strict=True) if o.any()]
    for start in sorted({int(np.quantile(starts, q)) for q in (0.0, 0.1, 0.25, 0.5)} - {0}):
        yield f"the tokens from place {start} of a {of} on", [p >= start for p in places]


def _unlikely(lines: Sequence[Line], odd: Masks) -> Iterator[tuple[str, Masks]]:
    """The tokens below a probability that nearly all odd tokens are below."""
    scored = np.concatenate([x.scored[o] for x, o in zip(lines, odd, strict=True)])
    most = float(np.quantile(scored[np.isfinite(scored)], 0.95)) if np.isfinite(scored).any() else 0.0
    if most < math.log(0.5):
        with np.errstate(invalid="ignore"):
            yield f"the tokens of a probability below {math.exp(most):.2g}", [x.scored <= most for x in lines]


def _line_words(whole: Sequence[bool], lines: Sequence[Line]) -> str:
    """Which lines are odd: those of a weight version, of some prompts, every k-th, long ones, or some."""
    odd = [x for x, w in zip(lines, whole, strict=True) if w]
    sound = [x for x, w in zip(lines, whole, strict=True) if not w]
    words = f"{len(odd)} of {len(lines)} lines"
    listed = f"{', '.join(str(x.index + 1) for x in odd[:6])}{', ...' if len(odd) > 6 else ''}"
    # So few lines are alike by chance in something.
    if len(odd) < _LINES or len(sound) < _LINES:
        return f"{words} ({listed})"
    for name, of in (("weight version", "version"), ("step", "step"), ("turn", "turn")):
        value, _ = Counter(getattr(x, of) for x in odd).most_common(1)[0]
        if value is not None and _are_those(odd, lines, lambda x, of=of, v=value: getattr(x, of) == v):
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
    return _f1(odd, lines, test) >= _SAME


def _f1(odd: Sequence[Line], lines: Sequence[Line], test: Callable[[Line], bool]) -> float:
    return 2.0 * sum(map(test, odd)) / (len(odd) + sum(map(test, lines)))


def _period(odd: Sequence[Line], lines: Sequence[Line]) -> tuple[int, int] | None:
    """The largest k, and the first line, for which every k-th line is odd; None for none.

    Of all lines only some are known, so a smaller k may look as good.
    """
    best, found = _SAME, None
    for k in range(2, 65):
        at, often = Counter(x.index % k for x in odd).most_common(1)[0]
        alike = _f1(odd, lines, lambda x, k=k, at=at: x.index % k == at)
        if often >= _LINES and alike >= best:
            best, found = alike, (k, at)
    return found


_LENGTHS: tuple[tuple[str, Callable[[Line], int]], ...] = (
    ("a completion", lambda x: len(x.completion_ids)),
    ("a prompt", lambda x: len(x.prompt_ids)),
    ("prompt and completion", lambda x: len(x.prompt_ids) + len(x.completion_ids)),
)


# --- the wrong numbers ---


Number = tuple[str, Callable[[int], np.ndarray]]  # in words, and [C] for a line; NaN where unknown


def wrong_numbers(evidence: Evidence, numbers: Iterable[Number] | None = None) -> Iterator[Prediction]:
    """Other numbers where the difference sits, and there alone. numbers: by default those of `_numbers`."""
    odd, usual = odd_tokens(evidence), _usual(evidence)
    if not _are_some(odd):
        return
    classes = _known_classes(evidence, odd)
    for number, change in _numbers(evidence) if numbers is None else numbers:
        new = [change(i).astype(np.float32) for i in range(len(evidence.lines))]
        able = [_is_odd(line, x, usual) for line, x in zip(evidence.lines, new, strict=True)]
        alike = _alike(odd, classes, able) or [_all(odd)]
        choices = max(1, len(classes) // len(alike))
        for words, masks, _ in alike:
            at_end = words.startswith(("the end", "the last"))
            if number == "0" and evidence.side == "sampler" and not at_end:
                continue  # tokens that were not drawn, which another hypothesis names
            what = f"in {words} the sampler's number is {number}"
            yield Prediction(what, _changed(evidence, masks, new), choices)
        if whole := _nearer_lines(evidence, new):
            everywhere = [np.full(len(x), w) for x, w in zip(new, whole, strict=True)]
            words = f"in {_line_words(whole, evidence.lines)} the sampler's number is {number}"
            yield Prediction(words, _changed(evidence, everywhere, new))


def _nearer_lines(evidence: Evidence, new: list[np.ndarray]) -> list[bool]:
    """Which lines come much nearer to the log with other numbers; empty where fewer than some do, or all.

    Some lines at fault differ by chance so little that their tokens are not odd.
    """
    whole = []
    for line, x in zip(evidence.lines, new, strict=True):
        known = ~(np.isnan(x) | np.isnan(line.logged) | np.isnan(line.scored))
        before, after = (np.abs(line.logged - y)[known].sum() for y in (line.scored, x))
        whole.append(bool(known.any() and after < _MUCH * before))
    return whole if _LINES <= sum(whole) < len(whole) else []


def _all(odd: Masks) -> Class:
    """The odd tokens themselves, where they are of no class."""
    words = f"the {_count(odd)} tokens that differ by far more than the others"
    return Class(words, odd, np.concatenate(odd))


def _changed(evidence: Evidence, masks: Masks, new: list[np.ndarray]) -> Scores:
    """The scores with other numbers at some places; those that are unknown stay."""
    columns = zip(evidence.lines, masks, new, strict=True)
    return {
        i: np.where(mask & ~np.isnan(x), x, line.scored).astype(np.float32)
        for i, (line, mask, x) in enumerate(columns)
    }


def _numbers(evidence: Evidence) -> Iterator[Number]:
    """What a number may be in place of its token's own."""
    lines = evidence.lines
    yield "0", lambda i: np.zeros(len(lines[i].scored))
    if (floor := _floor(lines)) is not None:
        yield f"{floor:g}, where it is cut off", lambda i: np.maximum(lines[i].scored, floor)
    yield "the next line's", lambda i: _of_line(evidence, lines[i], 1)
    yield "the line's before", lambda i: _of_line(evidence, lines[i], -1)
    for k in _EARLIER:
        yield f"that of an earlier token ({k} before)", lambda i, k=k: _moved(lines[i].scored, k)
        yield f"that of a later token ({k} after)", lambda i, k=k: _moved(lines[i].scored, -k)
    for base in (2, 10):
        yield f"a logarithm to the base {base}", lambda i, b=base: lines[i].scored / math.log(b)
    yield "the mean of the completion", lambda i: np.full(len(lines[i].scored), np.nanmean(lines[i].scored))


def _floor(lines: Sequence[Line]) -> float | None:
    """The least number of the log where several tokens have it, and their own are below; else None."""
    logged = np.concatenate([x.logged for x in lines])
    finite = logged[np.isfinite(logged)]
    if not len(finite):
        return None
    at = logged == (floor := float(finite.min()))
    below = np.concatenate([x.scored for x in lines]) < floor
    return floor if int((at & below).sum()) >= _FEWEST else None


def _of_line(evidence: Evidence, line: Line, by: int) -> np.ndarray:
    """The numbers of a line beside another one, as many as that one has."""
    other = evidence.beside(line, by)
    return _as_long(other.scored if other else np.empty(0), len(line.scored))


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
