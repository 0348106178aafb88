"""Which hypothesis fits a log: each predicts what the log would hold, and the nearest prediction is named.

A prediction fits exactly if it leaves a tenth of the difference. Under the rounding of other engines no
prediction does. There it fits if the difference follows it: with e = predicted - scored and r = logged -
scored, the slope of r on e is 1, it is far from 0 beside its error, and what is left is rounding
(noise.py). Where no single one fits, a second one is tried on what the best ones leave.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...engine.display.progress import silent
from ...files.dtypes import dtype_name
from ..faults.all_faults import predicted_count
from ..faults.fault import Predicted
from . import noise as rounding_of
from .chance import is_beyond_chance, shuffled_logs
from .chosen import by_nearest_engine, chosen_lines, inside, total_of, without_edge
from .compared import Compared, apart, shifted
from .difference_places import where
from .evidence import Evidence
from .judgement import (
    BOTH,
    DIMMED_SLOPE,
    ERRORS,
    EXACT,
    FEWEST_TOKENS,
    FIRST,
    FIRSTS,
    FP32,
    FP32_OF_BF16,
    LESS,
    MOST,
    OF_ALL,
    PROMISE,
    PROMISE_ERRORS,
    SCREENED,
    SECOND,
    SETTLED,
    SLOPE,
    SURE_ERRORS,
    TAIL,
    TIMES,
)
from .noise import Noise, beyond_slack, is_rounding
from .prediction import Prediction
from .scorable_lines import Scores
from .slope import slope
from .tried import Row, Tried

_Rows = list[tuple[Row, Prediction]]


@dataclass(frozen=True)
class _Judge:
    """What predictions are judged by."""

    evidence: Evidence
    base: Scores  # the column nearest to the log: the model's in one dtype
    noise: Noise | None  # of the dtypes that round most
    alike: Noise | None  # the least noise that the whole difference is like
    is_least: bool = False  # whether it is that of the dtypes that round least

    @cached_property
    def gaps(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """|logged - scored| and |logged - base| of each line's tokens."""
        pairs = []
        for i, x in enumerate(self.evidence.lines):
            now = apart(x, x.scored)
            pairs.append((now, now if self.base[i] is x.scored else apart(x, self.base[i])))
        return pairs

    @property
    def rounding(self) -> float:
        """What rounding makes of a token, in nats."""
        return self.noise.size if self.noise else FP32

    @cached_property
    def total(self) -> float:
        """The difference from the trainer's scores, in nats."""
        return total_of(self.evidence)

    @property
    def before(self) -> float:
        """The difference from the base, in nats."""
        return float(sum(np.nansum(beside_base) for _, beside_base in self.gaps))

    def is_rounding(
        self, left: Sequence[np.ndarray], scores: Sequence[np.ndarray], fault: Noise | None = None
    ) -> bool:
        """Whether what is left of the difference is rounding. fault: the noise of a fault itself."""
        noises = [self.noise] if self.evidence.scorer and self.noise else rounding_of.band(left, scores)
        noises += [fault] if fault else []
        return any(is_rounding(noise, left, scores, signed=False) for noise in noises)


def explain(evidence: Evidence, faults: Sequence[Predicted], stage: Callable[[str], None] = silent) -> Tried:
    """Try the faults that can be predicted, in their order; the others need a model.

    stage: is called with the fault that is tried now, in words.
    """
    evidence = inside(evidence)
    evidence = replace(evidence, lines=chosen_lines(evidence), log=evidence.lines)
    evidence = evidence.scorer.with_slack(evidence) if evidence.scorer else evidence
    gaps = np.concatenate([np.empty(0), *(apart(line, line.scored) for line in evidence.lines)])
    gaps = gaps[~np.isnan(gaps)]
    result = Tried(float(gaps.mean()) if len(gaps) else 0.0, len(gaps))
    if result.tokens < FEWEST_TOKENS or not result.distance:
        return result
    judge = _judge(by_nearest_engine(evidence))
    rows = _in_stages(judge, faults, stage)
    nearest, pairs = _nearest([row for row, _ in rows if row.fits]), []
    if not nearest and not judge.alike and (both := _second(judge, rows, faults, stage)):
        nearest = pairs = [both]
    return replace(
        result,
        rounding=judge.rounding,
        rounds_like=judge.alike.dtype if judge.alike else "",
        where=None if judge.alike else where(judge.evidence, judge.noise),
        tried=len(faults),
        need_a_model=predicted_count() - len(faults),
        best=nearest[0] if nearest else None,
        also=list(dict.fromkeys(row.what for row in nearest[1:] if row.what != nearest[0].what)),
        rows=[*pairs, *sorted(_best(rows), key=lambda row: row.share_left)],
    )


def _in_stages(judge: _Judge, faults: Sequence[Predicted], stage: Callable[[str], None]) -> _Rows:
    """How well the faults fit: the likely ones first, the others where none of these does."""
    early = [fault for fault in faults if not fault.is_late]
    if judge.is_least and judge.evidence.side == "trainer":
        early = [fault for fault in early if fault.is_of_whole_log]
    rows = _tried(judge, early, stage)
    if judge.alike or any(row.fits for row, _ in rows):
        return rows
    return rows + _tried(judge, [fault for fault in faults if fault.is_late], stage)


def _judge(evidence: Evidence) -> _Judge:
    """How the lines are judged: the noise of their dtypes, and the column that is nearest to them."""
    columns = [{i: x.scored for i, x in enumerate(evidence.lines)}]
    if evidence.scorer:
        evidence = replace(evidence, by_dtype=evidence.scorer.by_dtype(evidence))
        noises = _measured(evidence)
        columns += [without_edge(scores, evidence) for scores in evidence.by_dtype.values()]
    else:
        noises = rounding_of.band(_signed(evidence), [x.scored for x in evidence.lines])
    scored = [x.scored for x in evidence.lines]
    alike = next((x for x in noises if is_rounding(x, _signed(evidence), scored)), None)
    noise = noises[-1] if noises else None
    # No rounding chooses the tokens that it is large in. Beside a model the tail is not the log's own.
    if alike and alike.tail > TAIL and not evidence.scorer and where(evidence, noise):
        alike = None

    def total(scores: Scores) -> float:
        return sum(np.nansum(apart(x, scores[i])) for i, x in enumerate(evidence.lines))

    is_least = alike is not None and alike is noises[0]
    return _Judge(evidence, min(columns, key=total), noise, alike, is_least)


def _measured(evidence: Evidence) -> list[Noise]:
    """The noise beside the trainer's dtype of a sampler in each dtype, the least first."""
    exact, names = list(evidence.by_dtype["float32"].values()), evidence.by_dtype
    noises = {name: rounding_of.measured(name, list(x.values()), exact) for name, x in names.items()}
    # fp32 has 16 bits more than bf16; its engines differ by a few of the last ones.
    noises["float32"] = Noise("float32", max(noises["bfloat16"].size * FP32_OF_BF16, FP32))
    return rounding_of.pairs(dtype_name(evidence.scorer.dtype), noises)


def _signed(evidence: Evidence) -> list[np.ndarray]:
    """logged - scored of each line beyond its slack, NaN where either is unknown."""
    result = []
    for x in evidence.lines:
        with np.errstate(invalid="ignore"):
            d = x.logged.astype(np.float64) - x.scored
        d = np.where(np.isinf(x.logged) & (x.logged == x.scored), 0.0, d)
        result.append(beyond_slack(np.clip(d, -MOST, MOST), x.slack))
    return result


def _tried(
    judge: _Judge, faults: Sequence[Predicted], stage: Callable[[str], None], first: str = ""
) -> _Rows:
    """How well every prediction of some faults fits, in their order. first: a cause that is known.

    Where one leaves no more than rounding, those that search or compute again for minutes are left out.
    """
    rows, small = [], _screen(judge)
    for fault in faults:
        is_quick = fault.is_at_once or fault.is_of_whole_log
        if not is_quick and any(_leaves_rounding(row, judge) for row, _ in rows):
            continue
        stage(f"trying what may explain it: {' and '.join(filter(None, (first, fault.name)))}")
        if not small or _promises(fault, small):
            rows += _rows_of(fault, judge)
    return rows


def _rows_of(fault: Predicted, judge: _Judge) -> _Rows:
    """How well the predictions of a fault fit. None fits that explains no more than its freedom does."""
    predictions = list(fault.predict(judge.evidence))
    count = sum(p.choices for p in predictions)
    rows = [(row, p) for p in predictions if (row := _fit(fault, p, judge))]
    if count == 1 or not any(row.fits for row, _ in rows):
        return [(replace(row, candidates=count), p) for row, p in rows]
    nats = _left_by_chance(fault, predictions, judge)
    judged = []
    for row, p in rows:
        left = min(1.0, nats / row.distance)
        fits = row.fits and is_beyond_chance(row.share_left, left)
        judged.append((replace(row, fits=fits, candidates=count, left_by_chance=left), p))
    return judged


def _left_by_chance(fault: Predicted, predictions: Sequence[Prediction], judge: _Judge) -> float:
    """What the best prediction leaves of shuffled logs, in nats a token. It is chosen again for each."""
    least = math.inf
    chosen_by_log = any(p.choices > 1 for p in predictions)
    for evidence in shuffled_logs(judge.evidence, any(p.by_line for p in predictions)):
        shuffled = replace(judge, evidence=evidence)
        for p in fault.predict(evidence) if chosen_by_log else predictions:
            if row := _fit(fault, p, shuffled):
                least = min(least, row.share_left * row.distance)
    return least


def _leaves_rounding(row: Row, judge: _Judge) -> bool:
    """Whether a row is the whole difference but for what rounding makes of a token."""
    return row.fits and row.share_left <= SETTLED and row.left <= TIMES * judge.rounding


def _screen(judge: _Judge) -> _Judge | None:
    """The judge of the few lines that are farthest apart for their length; None where all are few."""
    lines = judge.evidence.lines
    if judge.evidence.scorer is None or len(lines) <= 2 * SCREENED:
        return None
    order = np.argsort([-np.nansum(apart(x, x.scored)) for x in lines])
    chosen = sorted(order[:SCREENED])
    screened = {name: {k: x[i] for k, i in enumerate(chosen)} for name, x in judge.evidence.by_dtype.items()}
    evidence = replace(judge.evidence, lines=[lines[i] for i in chosen], by_dtype=screened)
    return replace(judge, evidence=evidence, base={k: judge.base[i] for k, i in enumerate(chosen)})


def _promises(fault: Predicted, small: _Judge) -> bool:
    """Whether a fault explains something of a few lines. Those that need the other lines always do."""
    if fault.is_of_whole_log:
        return True
    for p in fault.predict(small.evidence):
        row = _fit(fault, p, small)
        if row and (row.fits or row.share_left <= PROMISE or (row.errors >= PROMISE_ERRORS)):
            return True
    return False


def _best(rows: _Rows) -> list[Row]:
    """The best row of each hypothesis: one that fits, then the one that leaves least."""
    best: dict[str, Row] = {}
    for row, _ in rows:
        known = best.get(row.name)
        if known is None or (not row.fits, row.share_left) < (not known.fits, known.share_left):
            best[row.name] = row
    return list(best.values())


def _second(
    judge: _Judge, rows: _Rows, faults: Sequence[Predicted], stage: Callable[[str], None]
) -> Row | None:
    """Two causes at once: another one on what each of the best first ones leaves; None where no two fit."""
    evidence, firsts = judge.evidence, {}
    roundings = {fault.name for fault in faults if fault.is_rounding}
    for row, p in sorted(rows, key=lambda pair: pair[0].share_left):
        whole = row.lines_tried == len(evidence.lines) and not p.searched
        if row.share_left <= FIRST and whole and row.name not in roundings:
            firsts.setdefault(row.name, (row, p))
    fitting = []
    for first, p in list(firsts.values())[:FIRSTS]:
        after = _judge_after(judge, p)
        others = [fault for fault in faults if fault.is_second and fault.name != first.name]
        for second, _ in _tried(after, others, stage, first.name):
            share = second.left * second.tokens / max(judge.before, 1e-30)
            if second.fits and share <= BOTH and second.share_left <= SECOND:
                fitting.append(_together(first, second, share))
    return min(fitting, key=lambda row: row.left, default=None)


def _judge_after(judge: _Judge, p: Prediction) -> _Judge:
    """The judge of a second cause, once a first one is so."""
    evidence, base = judge.evidence, judge.base
    if p.undone is not None:
        lines = [replace(x, logged=p.undone(x.logged)) for x in evidence.lines]
        return replace(judge, evidence=replace(evidence, lines=lines))
    lines = []
    for i, x in enumerate(evidence.lines):
        params = x.params._replace(**p.params) if p.params and x.params else x.params
        lines.append(replace(x, scored=p.scores[i], params=params))
    scorer = evidence.scorer.altered(p.decoder) if p.decoder is not None else evidence.scorer
    moved = {i: shifted(x.scored, p.scores[i], base[i]) for i, x in enumerate(evidence.lines)}
    return replace(judge, evidence=replace(evidence, lines=lines, scorer=scorer, by_dtype={}), base=moved)


def _together(first: Row, second: Row, share: float) -> Row:
    """The row of two causes."""
    return replace(
        second,
        name=f"{first.name} and {second.name}",
        what=f"{first.what}; and {second.what}",
        remedy=f"{first.remedy} {second.remedy}",
        distance=first.distance,
        explained=first.distance - second.left,
        share_left=share,
        candidates=first.candidates * second.candidates,
    )


def _nearest(fitting: Sequence[Row]) -> list[Row]:
    """Those that leave the least. To within rounding they cannot be told apart; the first is the simplest."""
    exact = [row for row in fitting if row.is_exact]
    fitting = exact or fitting
    least = min((row.left for row in fitting), default=0.0)
    return [row for row in fitting if row.left <= 1.1 * least + 0.1 * FP32]


def _fit(fault: Predicted, prediction: Prediction, judge: _Judge) -> Row | None:
    """How well a prediction fits the lines that it is about; None where it is about too few tokens.

    A line for which it is worse than the trainer's own scores keeps those: a fault need not be in each line.
    """
    evidence, compared = judge.evidence, Compared()
    for i, scores in without_edge(prediction.scores, evidence).items():
        compared.add(evidence.lines[i], scores, judge.base[i], judge.gaps[i])
    if compared.tokens < FEWEST_TOKENS or not compared.before:
        return None
    exact = compared.after / compared.before
    # It must speak of most of the difference, or of the lines that were chosen as the farthest apart.
    most = prediction.searched or compared.before >= OF_ALL * judge.total
    angle, errors = slope(compared.effects, compared.differences, compared.scores)
    share = compared.after_base / compared.before_base if compared.before_base else 1.0
    least = DIMMED_SLOPE if fault.is_dimmed else SLOPE[0]
    follows = least <= angle <= SLOPE[1] and share <= LESS
    follows = follows and errors >= (SURE_ERRORS if judge.alike else ERRORS)
    follows = follows and not (judge.alike and fault.is_rounding)
    fits = exact <= EXACT or (follows and judge.is_rounding(compared.left, compared.scores, prediction.noise))
    left = compared.after if exact <= share else compared.after_base
    return Row(
        name=fault.name,
        what=_of_side(prediction.what, evidence.side),
        remedy=fault.remedy,
        distance=compared.before / compared.tokens,
        left=left / compared.tokens,
        explained=(compared.before - left) / compared.tokens,
        share_left=left / compared.before if exact <= share else share,
        tokens=compared.tokens,
        lines=compared.nearer,
        lines_tried=len(prediction.scores),
        slope=angle,
        errors=errors if math.isfinite(errors) else 1e9,
        fits=bool(fits and most),
        searched=prediction.searched,
    )


def _of_side(what: str, side: str) -> str:
    """A prediction's words for the side at fault. Predictions call it the sampler."""
    if side == "sampler":
        return what
    other = {"sampler": "trainer", "trainer": "sampler"}
    return re.sub("sampler|trainer", lambda word: other[word.group()], what).replace("logged", "trainer's")
