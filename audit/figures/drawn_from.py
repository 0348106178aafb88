"""Whether the two columns of a log can be the distribution that its tokens were drawn from, without a model.

s and t are the probabilities of a drawn token in the sampler's and in the trainer's column; r = t / s.
Where the tokens were drawn from s, and t is a distribution over what s can draw, E[r] = 1. Each check below
looks for one fault that two sound columns, however they round, do not show:

    evidence    t explains the tokens better than s: they were not drawn from s (measure.evidence)
    cut         t = s Z with the mass Z of the kept set, so r <= 1, and of top-p top_p <= r: t is without it.
                s = t Z is the same of s, and then E[r] > 1.
    tempered    s is t^a, renormalised, with a = 1 / temperature: t is without the temperature. Whatever the
                other tokens are, logit s >= a logit t where t > 1/2 and a > 1.
    repeats     completions of one prompt draw the same token more often than the column says. It needs no
                second column, so it sees two equal columns that both leave something out.

Where t gives tokens that exclude each other more than 1 together, it is no distribution, and only repeats
are asked.

A token of temperature 0 was not drawn from any column, and is passed over.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...kernels.sampling_params import SamplingParams
from ...verify.mismatch import infinite, log_ratios, mean, outside, rest, standard_error
from ..faults.columns import no_cut, no_temperature, not_drawn_from
from ..faults.fault import Checked
from ..finding import Finding
from .measure import MeanRatio, kept_lengths, mean_ratio
from .repeats import Drawn, Repeats, masses, repeats

# Standard errors, and nats of evidence (chance exp(-14), one in a million), from which nothing is chance.
ERRORS, EVIDENCE = 4.0, 14.0
# A mean ratio closer to 1 is left to rounding: a log-softmax in fp32 has a mass of 1 + 1e-5 now and then.
LEAST = 1e-3
# Tokens that the trainer expects and the sampler does not draw. With fewer, they may be rare and not absent.
MISSING = 10.0
# What a cut may leave unexplained of sum |d|: where the log declares the cut, and where it declares none. Of
# a declared top-p, whose bound is known, rounding is left out up to so many times its size.
_CUT, _UNDECLARED, _NOISE = 0.25, 0.02, 2.0
# Tokens that a cut needs to be told, and the share that rounding may put out of a trainer's set at its edge.
_FEWEST_CUT, _EDGE = 50, 0.02
# Of the tempered check: what may be left of the predicted difference, and tokens that it needs. In a tenth of
# these the rest of the mass is on few other tokens. Then the difference is little more than predicted.
_TEMPERED, _FEWEST, _TIGHT = 0.1, 12, 2.0
# Difference that a temperature must make of a token, in nats: more than two fp32 forwards differ by.
_GAP = 1e-4
# The spread of a difference, as a share of it, below which it is one number.
_ONE_NUMBER = 0.1
# Places with several tokens that are needed, the mass of these beyond any rounding, and the share above it.
_FEWEST_SUMS, _WHOLE, _SUMS_BEYOND = 4, 1.1, 0.25
# Places where completions of one prompt agree so far, that are needed, and the least difference.
_FEWEST_PLACES, _AGREE = 16, 0.005
# A cut that the log does not declare.
_ANY_CUT = "top-p, top-k or min-p"
# The kind of a fault of the trainer's column: it lacks a cut that no line declares, so the cut is a guess.
UNDECLARED_CUT = no_cut.FAULT.name.format(side="trainer", cut=_ANY_CUT)
# Larger logs are judged by their first tokens.
_TOKENS = 2**21
_SAME = 1e-5  # nats up to which two numbers of an fp32 forward may be the same one


@dataclass(frozen=True)
class _Tokens:
    """All judged tokens, [N]."""

    sampler: np.ndarray
    trainer: np.ndarray
    d: np.ndarray
    temperature: np.ndarray  # 1 where the log declares none
    log_top_p: np.ndarray  # 0 where it declares none, or another cut whose mass is not known
    cut: np.ndarray  # whether it declares a cut
    cuts: str  # their names
    ratio: MeanRatio
    k1: float
    k1_error: float


@dataclass(frozen=True)
class Signs:
    """How many tokens are no less likely for one side, and the largest difference each way, in nats."""

    sampler_not_less: int
    trainer_not_less: int
    sampler_above: float
    trainer_above: float

    def not_less(self, side: str) -> int:
        """Tokens that are no less likely for a side, "sampler" or "trainer"."""
        return self.sampler_not_less if side == "sampler" else self.trainer_not_less

    def above(self, side: str) -> float:
        """By how much the log-probability of a side is the larger one, at most."""
        return self.sampler_above if side == "sampler" else self.trainer_above


@dataclass(frozen=True)
class Distribution:
    """Whether tokens were drawn from the columns. Nothing is known where no token was judged."""

    tokens: int
    fault: Finding | None = field(default=None, metadata={"json": "found"})
    mean_ratio: MeanRatio | None = None
    signs: Signs | None = None
    repeats: Repeats | None = None


def check(rollouts: Sequence[Drawn], doubled: bool = False) -> Distribution:
    """The part of a report on whether tokens were drawn from the columns.

    doubled: whether the log holds lines twice; then repeats say nothing.
    """
    judged, count = [], 0
    for x in rollouts:
        if len(x.sampler) and count < _TOKENS and (x.params is None or x.params.temperature > 0.0):
            judged.append(x)
            count += len(x.sampler)
    if not judged:
        return Distribution(0)
    tokens = _tokens(judged)
    repeated = None if doubled else repeats(judged)
    fault = None if _is_no_distribution(judged) else _cut(tokens) or _tempered(tokens) or _sampler(tokens)
    fault = fault or _repeated(repeated, tokens)
    return Distribution(len(tokens.d), fault, tokens.ratio, _signs(tokens), repeated)


def _tokens(rollouts: Sequence[Drawn]) -> _Tokens:
    lengths = [len(x.sampler) for x in rollouts]
    sampler, trainer = (
        np.concatenate([getattr(x, name) for x in rollouts]) for name in ("sampler", "trainer")
    )
    d = log_ratios(trainer, sampler)
    known = ~(outside(d) | infinite(d))
    params = [x.params or SamplingParams() for x in rollouts]

    def by_token(values: list[float]) -> np.ndarray:
        return np.repeat(np.array(values), lengths)

    return _Tokens(
        sampler,
        trainer,
        d,
        by_token([p.temperature for p in params]),
        by_token([math.log(p.top_p) if _bounded(p) else 0.0 for p in params]),
        by_token([p.cuts for p in params]),
        _cut_names(params),
        mean_ratio(d, lengths),
        mean(-d[known]),
        standard_error(d[known], kept_lengths(known, lengths)),
    )


def _bounded(params: SamplingParams) -> bool:
    """Whether top_p bounds the mass that is left out."""
    return params.top_p < 1.0 and params.min_p == 0.0 and params.allowed_token_ids is None


def _cut_names(params: Sequence[SamplingParams]) -> str:
    declared = {
        "top-p": any(p.top_p < 1.0 for p in params),
        "top-k": any(p.top_k > 0 for p in params),
        "min-p": any(p.min_p > 0.0 for p in params),
        "allowed tokens": any(p.allowed_token_ids is not None for p in params),
    }
    return " and ".join(name for name, there in declared.items() if there)


def _signs(tokens: _Tokens) -> Signs:
    known = rest(tokens.d)
    return Signs(
        sampler_not_less=int((tokens.d <= _SAME).sum()),
        trainer_not_less=int((tokens.d >= -_SAME).sum()),
        sampler_above=abs(float(known.min(initial=0.0))),
        trainer_above=float(known.max(initial=0.0)),
    )


def _is_no_distribution(rollouts: Sequence[Drawn]) -> bool:
    """Whether the trainer gives tokens that exclude each other more than the whole mass.

    Such a column explains any tokens, so the checks against it tell nothing of the sampler's. Of the places
    with several tokens, rounding brings few above the bound.
    """
    sums = np.array(masses(rollouts))
    return len(sums) >= _FEWEST_SUMS and float((sums > _WHOLE).mean()) > _SUMS_BEYOND


# --- the temperature ---


def _tempered(tokens: _Tokens) -> Finding | None:
    """A column of the raw logits beside one of the declared temperature."""
    evident = tokens.ratio.evidence
    # A trainer without the temperature does not make the sampler's column a wrong one. The reverse does.
    if evident < EVIDENCE and (seen := _one_is_tempered(tokens, tokens.trainer, tokens.sampler)):
        return _found_tempered("trainer", "sampler", seen)
    if evident > 0.0 and (seen := _one_is_tempered(tokens, tokens.sampler, tokens.trainer)):
        return _found_tempered("sampler", "trainer", seen)
    return None


def _one_is_tempered(tokens: _Tokens, raw: np.ndarray, other: np.ndarray) -> tuple[int, int, str] | None:
    """Whether `other` is `raw` at the declared temperature: tokens that say so, of how many, and temperature.

    With a temperature below 1 `other` is the sharper of the two, else `raw` is.
    """
    below = tokens.temperature < 1.0
    flat, sharp = (np.where(below, *x).astype(np.float64) for x in ((raw, other), (other, raw)))
    power = np.maximum(tokens.temperature, 1.0 / tokens.temperature)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        x = _logit(flat)
        least = -np.logaddexp(0.0, -power * x)  # log of the least that `sharp` can be
        told = (flat > math.log(0.5)) & (least - flat > _GAP) & np.isfinite(sharp)
        if told.sum() < _FEWEST:
            return None
        flat, sharp, least, x, power = (v[told] for v in (flat, sharp, least, x, power))
        lacking = np.maximum(least - sharp, 0.0)
        # A cut of the sampler adds -log(top_p) at most, which is not the temperature's.
        excess = (_logit(sharp + tokens.log_top_p[told] * below[told]) - x) / ((power - 1.0) * x)
    if lacking.sum() > _TEMPERED * (least - flat).sum():
        return None
    if not np.quantile(excess, 0.1, method="lower") <= _TIGHT:
        return None
    temperatures = np.unique(tokens.temperature[told]).tolist()
    words = f"temperature {temperatures[0]:g}" if len(temperatures) == 1 else "the temperature"
    return int((lacking <= _SAME).sum()), len(flat), words


def _logit(logp: np.ndarray) -> np.ndarray:
    """log(p / (1 - p)) from log p."""
    return -np.log(np.expm1(-logp))


def _found_tempered(raw: str, other: str, seen: tuple[int, int, str]) -> Finding:
    agree, told, words = seen
    return _finding(
        no_temperature.FAULT,
        f"the {raw}'s column is without the temperature: {words} is declared, and only the {other}'s "
        "column has it. A temperature takes a probability p above 1/2 to p^a / (p^a + (1 - p)^a) or further, "
        f"where a is 1 / temperature. It changes {told:,} of the tokens by more than rounding, and {agree:,} "
        "of them differ so.",
        side=raw,
    )


def _finding(fault: Checked, text: str, **words: str) -> Finding:
    """A fault of the table as a finding. words: as Checked.named takes them."""
    named = fault.named(text, **words)
    return Finding(named.name, named.text, named.remedy)


# --- mean ratio, sign and bound ---


def drawn_elsewhere(ratio: MeanRatio, k1: float | None, k1_error: float | None) -> bool:
    """Whether the tokens were not drawn from the sampler's column. ratio: measure.mean_ratio."""
    above = _beyond(ratio.value, 1.0 + LEAST, ratio.standard_error)
    negative = _beyond(0.0, k1, k1_error)
    return (ratio.evidence or 0.0) >= EVIDENCE and (above or negative)


def mass_missing(ratio: MeanRatio, tokens: int) -> bool:
    """Whether the trainer has mass on tokens that the sampler does not draw. tokens: how many were drawn."""
    below = _beyond(1.0 - LEAST, ratio.value, ratio.standard_error)
    return below and (1.0 - ratio.value) * tokens >= MISSING


def _beyond(larger: float | None, smaller: float | None, error: float | None) -> bool:
    """Whether larger - smaller is above 0 by more than chance; False where a figure is unknown."""
    if None in (larger, smaller, error):
        return False
    return larger - smaller > ERRORS * error and larger - smaller > 0.0


def ratio_words(ratio: MeanRatio) -> str:
    """The mean ratio with its error."""
    error = ratio.standard_error
    with_error = "" if error is None or math.isnan(error) else f" ± {error:.2g}"
    return f"the mean ratio is {ratio.value:.4g}{with_error}"


def _cut(tokens: _Tokens) -> Finding | None:
    """One column without the cut of the other.

    A trainer that cuts, but otherwise, gives probability 0 to some tokens. A trainer that gives it to none,
    and has mass on what the sampler does not draw, does not cut.
    """
    if drawn_elsewhere(tokens.ratio, tokens.k1, tokens.k1_error) and _is_cut(tokens, tokens.d, _EDGE):
        return _found_cut(tokens, "sampler", "trainer")
    if mass_missing(tokens.ratio, len(tokens.d)) and _is_cut(tokens, -tokens.d, 0.0):
        return _found_cut(tokens, "trainer", "sampler")
    return None


def _is_cut(tokens: _Tokens, above: np.ndarray, edge: float) -> bool:
    """Whether `above` [N], the log ratio of cut to uncut, has the sign and the bound of a cut.

    Where the bound is known, the mean ratio must keep it as well, and tokens keep both within rounding.
    edge: the share of tokens that may have probability 0.
    """
    finite = np.isfinite(above)
    # The mass that a cut leaves out is another one at each place. One number for all of them is no cut.
    low, middle, high = np.quantile(above[finite], (0.1, 0.5, 0.9)) if finite.any() else (0.0, 0.0, 0.0)
    if not tokens.cut.any() and high - low < _ONE_NUMBER * middle:
        return False
    if finite.sum() < _FEWEST_CUT or finite.mean() < 1.0 - edge:
        return False
    above, bounded = above[finite], tokens.log_top_p[finite] < 0.0
    bound = np.where(bounded, -tokens.log_top_p[finite], np.inf)
    if bounded.all() and mean(np.exp(-above)) < math.exp(-bound.max()) - ERRORS * _error(tokens):
        return False
    # The usual estimate of a standard deviation that tails do not move: 1.48 times the median deviation.
    noise = _NOISE * 1.4826 * float(np.median(np.abs(above - np.median(above)))) * bounded
    left = np.maximum(np.maximum(-above, above - bound) - noise, 0.0).sum()
    allowed = _CUT if tokens.cut.mean() > 0.5 else _UNDECLARED
    return bool(left <= allowed * np.abs(above).sum())


def _error(tokens: _Tokens) -> float:
    """The standard error of the mean ratio; 0 for a single token."""
    return np.nan_to_num(tokens.ratio.standard_error)


def _sampler(tokens: _Tokens) -> Finding | None:
    """A sampler's column that the tokens were not drawn from, whatever it is."""
    if not drawn_elsewhere(tokens.ratio, tokens.k1, tokens.k1_error):
        return None
    return _finding(
        not_drawn_from.FAULT,
        "the sampler reported log-probabilities of another distribution than the one it drew from: most "
        "often from before the temperature, top-k or top-p. The trainer's column explains the drawn tokens "
        f"better than the sampler's own; {ratio_words(tokens.ratio)}, where sound columns have 1.",
    )


def _found_cut(tokens: _Tokens, without: str, other: str) -> Finding:
    signs, count = _signs(tokens), len(tokens.d)
    what, bound = _cut_words(tokens)
    return _finding(
        no_cut.FAULT,
        f"the {without}'s column is without the sampler's {what}: the {other}'s log-probability is not the "
        f"smaller one in {signs.not_less(other):,} of {count:,} tokens, and is larger by "
        f"{signs.above(other):.3g} at most{bound}; {ratio_words(tokens.ratio)}, where sound columns "
        "have 1.",
        side=without,
        cut=what,
    )


def _cut_words(tokens: _Tokens) -> tuple[str, str]:
    """The name of the cut, and what bounds the difference."""
    if not tokens.cut.any():
        return _ANY_CUT, ", though the log declares no cut"
    lowest = float(tokens.log_top_p.min())
    if lowest == 0.0:
        return tokens.cuts, ""
    return "top-p", f" (-log {math.exp(lowest):.4g} is {-lowest:.3g})"


# --- repeats ---


def _repeated(seen: Repeats | None, tokens: _Tokens) -> Finding | None:
    """Completions of one prompt that show the sampler's column not to be what was drawn from."""
    if not seen or seen.places < _FEWEST_PLACES:
        return None
    excess = seen.same - seen.expected
    if abs(excess) < _AGREE or abs(excess) <= ERRORS * seen.standard_error:
        return None
    both = " and so neither column is" if not tokens.d.any() else " and so the sampler's column is not"
    how = "sharper" if excess > 0 else "flatter"
    return _finding(
        not_drawn_from.FAULT,
        f"the tokens were drawn from a {how} distribution than the sampler's column,{both} the one: where "
        f"completions of one prompt agree so far, two of them draw the same token in {seen.same:.2%} of "
        f"the cases, and the column says {seen.expected:.2%} ± {seen.standard_error:.2%} "
        f"({seen.places:,} places). Most often the temperature, top-p or top-k is not in the column; "
        "completions drawn with one seed look like this, too.",
    )
