"""Wrong numbers at some places: 0, another token's or another line's, in another unit, or of other logits.

Where the difference sits is looked for first (hypotheses/difference_places.py). The numbers are tried there
alone. A model knows two more numbers: the likeliest token's, and that of the raw logits.

Shapes: C completion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ....kernels.sampling_params import SamplingParams
from ...hypotheses.column_numbers import moved
from ...hypotheses.difference_places import (
    Class,
    Masks,
    alike_classes,
    are_some,
    count,
    has_odd_tokens,
    is_odd,
    known_classes,
    line_words,
    odd_tokens,
    usual_difference,
)
from ...hypotheses.evidence import Evidence
from ...hypotheses.judgement import FEWEST_ODD, MUCH, ODD_LINES
from ...hypotheses.prediction import Prediction
from ...hypotheses.scorable_lines import Line, Scores
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.sampling import Line as Planted
    from ..planting.world import Log, World

Number = tuple[str, Callable[[int], np.ndarray]]  # in words, and [C] for a line; NaN where unknown
# Tokens between one and the other whose number it may have.
_EARLIER = range(1, 9)


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Other numbers where the difference sits, and there alone."""
    yield from _tried(evidence, _numbers(evidence))
    if evidence.scorer is not None and has_odd_tokens(evidence):
        yield from _tried(evidence, _numbers_of_model(evidence))


def _tried(evidence: Evidence, numbers: Iterable[Number]) -> Iterator[Prediction]:
    odd, usual = odd_tokens(evidence), usual_difference(evidence)
    if not are_some(odd):
        return
    classes = known_classes(evidence, odd)
    for number, change in numbers:
        new = [change(i).astype(np.float32) for i in range(len(evidence.lines))]
        able = [is_odd(line, x, usual) for line, x in zip(evidence.lines, new, strict=True)]
        alike = alike_classes(odd, classes, able) or [_all(odd)]
        choices = max(1, len(classes) // len(alike))
        for words, masks, _ in alike:
            at_end = words.startswith(("the end", "the last"))
            if number == "0" and evidence.side == "sampler" and not at_end:
                continue  # tokens that were not drawn: zeros.py
            what = f"in {words} the sampler's number is {number}"
            yield Prediction(what, _changed(evidence, masks, new), choices)
        if whole := _nearer_lines(evidence, new):
            everywhere = [np.full(len(x), w) for x, w in zip(new, whole, strict=True)]
            words = f"in {line_words(whole, evidence.lines)} the sampler's number is {number}"
            yield Prediction(words, _changed(evidence, everywhere, new))


def _nearer_lines(evidence: Evidence, new: list[np.ndarray]) -> list[bool]:
    """Which lines come much nearer to the log with other numbers; empty where fewer than some do, or all.

    Some lines at fault differ by chance so little that their tokens are not odd.
    """
    whole = []
    for line, x in zip(evidence.lines, new, strict=True):
        known = ~(np.isnan(x) | np.isnan(line.logged) | np.isnan(line.scored))
        before, after = (np.abs(line.logged - y)[known].sum() for y in (line.scored, x))
        whole.append(bool(known.any() and after < MUCH * before))
    return whole if ODD_LINES <= sum(whole) < len(whole) else []


def _all(odd: Masks) -> Class:
    """The odd tokens themselves, where they are of no class."""
    words = f"the {count(odd)} tokens that differ by far more than the others"
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
        yield f"that of an earlier token ({k} before)", lambda i, k=k: moved(lines[i].scored, k)
        yield f"that of a later token ({k} after)", lambda i, k=k: moved(lines[i].scored, -k)
    for base in (2, 10):
        yield f"a logarithm to the base {base}", lambda i, b=base: lines[i].scored / math.log(b)
    yield "the mean of the completion", lambda i: np.full(len(lines[i].scored), np.nanmean(lines[i].scored))


def _floor(lines: Sequence[Line]) -> float | None:
    """The least number of the log where several tokens have it, and their own are below; else None."""
    logged = np.concatenate([x.logged for x in lines])
    finite = logged[np.isfinite(logged)]
    if not len(finite):
        return None
    cut_off = logged == (floor := float(finite.min()))
    below = np.concatenate([x.scored for x in lines]) < floor
    return floor if int((cut_off & below).sum()) >= FEWEST_ODD else None


def _of_line(evidence: Evidence, line: Line, by: int) -> np.ndarray:
    """The numbers of a line beside another one, as many as that one has."""
    other = evidence.beside(line, by)
    return _as_long(other.scored if other else np.empty(0), len(line.scored))


def _as_long(x: np.ndarray, n: int) -> np.ndarray:
    """x cut or filled with NaN to n numbers."""
    return np.concatenate([x[:n], np.full(max(n - len(x), 0), np.nan)])


def _numbers_of_model(evidence: Evidence) -> Iterator[Number]:
    """What only a model knows; of as many lines as it holds the logits of."""
    lines, rows = evidence.lines, evidence.scorer.rows(evidence)

    def known(i: int, number: Callable[[int], np.ndarray]) -> np.ndarray:
        return number(i) if i in rows.logits else np.full(len(lines[i].scored), np.nan)

    yield "the likeliest token's", lambda i: known(i, rows.likeliest)
    if any(p != SamplingParams() for p in evidence.params()):
        yield "of the raw logits", lambda i: known(i, rows.raw)


# --- plants ---


def _replaced(line: Planted, places: np.ndarray, values: np.ndarray) -> Planted:
    """The line with other numbers of the trainer at some places."""
    column = line.trainer.copy()
    column[places] = values
    return replace(line, trainer=column)


def zero_at_the_end_token(w: World) -> Log:
    """A trainer that fills up with 0, the end token included."""
    lines = w.both(w.drawn())
    return w.log([_replaced(x, np.array(x.completion) == w.end_id, 0.0) for x in lines], with_model=False)


def zero_first_in_a_chunk(w: World) -> Log:
    """A trainer that scores in chunks, and loses the first token of each."""
    k = int(w.rng.integers(9, 17))
    lines = w.both(w.drawn())
    return w.log([_replaced(x, np.arange(len(x.trainer)) % k == 0, 0.0) for x in lines], with_model=False)


def first_token_of_the_next_line(w: World) -> Log:
    """An index off by one line, at the first token alone."""
    lines = w.both(w.drawn())
    firsts = [lines[(i + 1) % len(lines)].trainer[0] for i in range(len(lines))]
    return w.log([_replaced(x, np.array([0]), f) for x, f in zip(lines, firsts, strict=True)])


def an_earlier_tokens_number(w: World) -> Log:
    """From a place on, the number of a token some places before."""
    k, start = int(w.rng.integers(2, 5)), int(w.rng.integers(30, 40))
    lines = []
    for x in w.both(w.drawn()):
        places = np.arange(start, len(x.trainer))
        lines.append(_replaced(x, places, x.trainer[places - k]) if len(places) else x)
    return w.log(lines, with_model=False)


def the_likeliest_tokens_number(w: World) -> Log:
    """Every k-th number is that of the token which a greedy sampler would have drawn."""
    lines = w.both(w.drawn())
    k = int(w.rng.integers(3, 6))
    return w.log(
        [
            replace(x, sampler=np.where(np.arange(len(x.sampler)) % k == k - 1, w.likeliest(x), x.sampler))
            for x in lines
        ]
    )


def base_two_in_one_rank(w: World) -> Log:
    """One rank of four logs binary logarithms."""
    lines = w.both(w.drawn())
    scale = np.where(np.arange(len(lines)) % 4 == 3, 1 / np.log(2.0), 1.0)
    lines = [replace(x, trainer=np.float32(x.trainer * s)) for x, s in zip(lines, scale, strict=True)]
    return w.log(lines, with_model=False)


def next_lines_numbers_in_one_rank(w: World) -> Log:
    """One rank of three gathers with an index off by one."""
    lines = w.both(w.drawn())
    rank, wrong = int(w.rng.integers(3)), []
    for i, x in enumerate(lines):
        other = lines[(i + 1) % len(lines)].trainer
        n = min(len(other), len(x.trainer))
        wrong.append(_replaced(x, np.arange(n), other[:n]) if i % 3 == rank else x)
    return w.log(wrong, with_model=False)


def zeros_beyond_a_length(w: World) -> Log:
    """A trainer that cuts its sequences: what is beyond has the number 0."""
    most, lines = int(w.rng.integers(50, 65)), w.both(w.drawn())
    beyond = [np.arange(len(x.trainer)) + len(x.prompt) >= most for x in lines]
    return w.log([_replaced(x, b, 0.0) for x, b in zip(lines, beyond, strict=True)], with_model=False)


def numbers_cut_off_below(w: World) -> Log:
    """A server that clips small log-probabilities."""
    floor = np.float32(-w.uniform(3.0, 5.0))
    lines = [replace(x, sampler=np.maximum(x.sampler, floor)) for x in w.drawn()]
    return w.log(w.both(lines), with_model=False)


def first_token_without_the_temperature(w: World) -> Log:
    """The token of the prefill is reported from before the temperature."""
    s = replace(w.usual, temperature=w.uniform(0.55, 0.7))
    lines = w.drawn(s)
    raw = w.scored(w.bf16, lines, w.raw)
    first = [replace(x, sampler=np.append(r[:1], x.sampler[1:])) for x, r in zip(lines, raw, strict=True)]
    return w.log(w.both(first, s), s)


def one_group_without_the_temperature(w: World) -> Log:
    """The trainer forgets the temperature for the lines of two prompts."""
    lines, raw = w.both(w.drawn()), w.scored(w.fp32, w.drawn(), w.raw)
    pairs = enumerate(zip(lines, raw, strict=True))
    return w.log([replace(x, trainer=r) if 3 <= i < 9 else x for i, (x, r) in pairs])


def long_lines_without_the_temperature(w: World) -> Log:
    """Long completions take another path in the trainer, which lacks the temperature."""
    lines, raw = w.both(w.drawn()), w.scored(w.fp32, w.drawn(), w.raw)
    long = sorted(len(x.completion) for x in lines)[2 * len(lines) // 3]
    pairs = zip(lines, raw, strict=True)
    return w.log([replace(x, trainer=r) if len(x.completion) >= long else x for x, r in pairs])


_RAW = ("of the raw logits", "trainer column, raw logits", "trainer column, another temp")

FAULT = Predicted(
    name="wrong numbers at some places",
    order=170,
    predict=predict,
    remedy="Score these tokens as all others: look for an index off by one, a chunk's edge, or a cut there.",
    tries="0, a floor, another line's or another token's number, another base, the completion's mean; with a "
    "model the likeliest token's number, and that of the raw logits. Where the difference sits, and there "
    "alone",
    is_second=True,
    is_of_whole_log=True,
    plants=(
        Plant(group="place", make=zero_at_the_end_token, named=("number is 0",)),
        Plant(group="place", make=zero_first_in_a_chunk, named=("number is 0",)),
        Plant(group="place", make=first_token_of_the_next_line, named=("next line", "another line")),
        Plant(group="place", make=an_earlier_tokens_number, named=("earlier token",)),
        Plant(group="place", make=the_likeliest_tokens_number, named=("likeliest",)),
        Plant(group="place", make=base_two_in_one_rank, named=("base",)),
        Plant(group="lines", make=next_lines_numbers_in_one_rank, named=("next line",)),
        Plant(group="lines", make=zeros_beyond_a_length, named=("number is 0",)),
        Plant(group="lines", make=numbers_cut_off_below, named=("cut off",)),
        Plant(group="lines", make=first_token_without_the_temperature, named=_RAW[:1]),
        Plant(group="lines", make=one_group_without_the_temperature, named=_RAW),
        Plant(group="lines", make=long_lines_without_the_temperature, named=_RAW),
    ),
)
