"""Hypotheses about the numbers themselves: rounded, in another unit, or beside the wrong token.

They need no model: the trainer's column is enough.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from .evidence import Evidence
from .lines import Line, Scores
from .places import wrong_numbers
from .prediction import Prediction

# Decimals that a log may keep.
_DECIMALS = range(1, 7)
_BASES = {"2": math.log(2.0), "10": math.log(10.0)}


def _mapped(evidence: Evidence, change: Callable[[Line], np.ndarray]) -> Scores:
    return {i: change(line).astype(np.float32) for i, line in enumerate(evidence.lines)}


def _logged(evidence: Evidence) -> np.ndarray:
    """All logged numbers of the lines, fp64."""
    values = np.concatenate([line.logged for line in evidence.lines]).astype(np.float64)
    return values[np.isfinite(values)]


def rounded(evidence: Evidence) -> Iterator[Prediction]:
    """Numbers of few digits. Only where every logged number has no more."""
    values = _logged(evidence)
    for decimals in _DECIMALS:
        # fp32 stores a decimal number with an error of half an ulp.
        if (
            np.abs(np.round(values, decimals) - values) <= np.spacing(np.abs(values).astype(np.float32))
        ).all():
            what = f"the logged numbers are rounded to {decimals} decimals"
            yield Prediction(
                what, _mapped(evidence, lambda line, n=decimals: np.round(line.scored.astype(np.float64), n))
            )
            break
    for name, rounding in (("bfloat16", through_bfloat16), ("float16", through_float16)):
        if np.array_equal(rounding(values.astype(np.float32)), values.astype(np.float32)):
            what = f"the logged numbers are rounded to {name}"
            yield Prediction(what, _mapped(evidence, lambda line, r=rounding: r(line.scored)))


def through_bfloat16(x: np.ndarray) -> np.ndarray:
    """x fp32, rounded to bf16: to the nearest, ties to the even one. NumPy has no such type."""
    bits = x.astype(np.float32).view(np.uint32)
    to_even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + to_even) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def through_float16(x: np.ndarray) -> np.ndarray:
    """x fp32, rounded to fp16."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def another_base(evidence: Evidence) -> Iterator[Prediction]:
    """Logarithms to another base than e."""
    for base, factor in _BASES.items():
        what = f"the logged numbers are logarithms to the base {base}, not natural ones"
        scores = _mapped(evidence, lambda line, f=factor: line.scored / f)
        yield Prediction(what, scores, undone=lambda x, f=factor: (x * f).astype(np.float32))


def sequence_mean(evidence: Evidence) -> Iterator[Prediction]:
    """One number for a whole completion, written at each token."""
    what = "each token has the mean of its completion"
    yield Prediction(what, _mapped(evidence, lambda line: np.full_like(line.scored, np.nanmean(line.scored))))


def shifted(evidence: Evidence) -> Iterator[Prediction]:
    """Each number stands one token too early or too late, in lines without a mask."""
    yield from _shifted(evidence, masked=False, words="each logged number stands one token too {}")


def mask_off_by_one(evidence: Evidence) -> Iterator[Prediction]:
    """The same, in lines whose mask leaves tokens out."""
    yield from _shifted(evidence, masked=True, words="the mask lies one token too {}")


def _shifted(evidence: Evidence, masked: bool, words: str) -> Iterator[Prediction]:
    for by, direction in ((1, "late"), (-1, "early")):
        scores = {
            i: _moved(line.scored, by)
            for i, line in enumerate(evidence.lines)
            if line.masked == masked and len(line.scored) > 2
        }
        yield Prediction(words.format(direction), scores)


def _moved(x: np.ndarray, by: int) -> np.ndarray:
    """x[i - by] at i; NaN where there is none."""
    moved = np.full_like(x, np.nan)
    if by > 0:
        moved[by:] = x[:-by]
    else:
        moved[:by] = x[-by:]
    return moved


def zeros(evidence: Evidence) -> Iterator[Prediction]:
    """Tokens that the model did not draw, with the number 0 in place of a log-probability."""
    if evidence.side == "trainer" or not (_logged(evidence) == 0.0).any():
        return
    if not any((line.logged[:-1] == 0.0).any() for line in evidence.lines):
        return  # the last token of a line was drawn
    what = "tokens that the model did not draw are logged with 0"
    yield Prediction(what, _mapped(evidence, lambda line: np.where(line.logged == 0.0, 0.0, line.scored)))


def another_lines_numbers(evidence: Evidence) -> Iterator[Prediction]:
    """The numbers of another line: of one as long, or of one of the same prompt, as many as that one has."""
    scores, most = {}, 1
    for i, line in enumerate(evidence.lines):
        n = len(line.scored)
        candidates = [
            np.concatenate([other.scored[:n], line.scored[len(other.scored) :]])
            for other in evidence.all_lines
            if other.index != line.index and (len(other.scored) == n or other.prompt_ids == line.prompt_ids)
        ]
        if candidates:
            scores[i], most = closest(line, candidates), max(most, len(candidates))
    yield Prediction("logged numbers belong to another line of the log", scores, choices=most, by_line=True)


def closest(line: Line, candidates: list[np.ndarray]) -> np.ndarray:
    """The candidate [C] that is nearest to the logged numbers of a line."""
    with np.errstate(invalid="ignore"):  # both may be at -inf
        distances = [np.nansum(np.minimum(np.abs(c - line.logged), 20.0)) for c in candidates]
    return candidates[int(np.argmin(distances))]


# By the name in registry.py.
PREDICTORS = {
    "rounded log-probabilities": rounded,
    "logarithms to another base": another_base,
    "means in place of tokens": sequence_mean,
    "off by one": shifted,
    "mask off by one": mask_off_by_one,
    "wrong numbers at some places": wrong_numbers,
    "zeros for tokens not drawn": zeros,
    "another line's numbers": another_lines_numbers,
}
