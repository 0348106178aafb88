"""Sentences of an audit beside its verdict: what the figures alone would not tell."""

import math

from ...files.reading import first_few
from ..figures.drawn_from import mass_missing, ratio_words
from ..figures.measure import Estimate
from ..page.numbers import percent
from ..report import Measurements
from ..sections import FullVocab
from ..sentence import begun
from ..settings import kept_set
from .faults import not_drawn_from
from .log_findings import log_notes

# The mean ratio from which truncation hides something, as a multiple of the truncated mean.
_HIDDEN = 1.05
# Sequences that a correction masks, as a share, and tokens as a share of those.
_MANY_SEQUENCES, _FEW_TOKENS = 0.1, 0.1
# Changed settings that a sentence lists.
LISTED = 4


def notes(measured: Measurements) -> list[str]:
    """What the figures alone would not tell."""
    texts = (
        _outside(measured),
        _infinite_ratios(measured),
        _negative(measured),
        _below_one(measured),
        _hidden_by_truncation(measured),
        _added_up(measured),
        _experts(measured),
        *_cut_off(measured),
        full_vocab_note(measured.full_vocab, measured.figures.equal),
        _against(measured),
        _batch_invariance(measured),
        *log_notes(measured),
    )
    return [text for text in texts if text]


def _batch_invariance(measured: Measurements) -> str:
    """What `--batch_invariance` showed, in a sentence; empty where it was not asked for."""
    seen = measured.batch_invariance
    if not seen:
        return ""
    name = measured.sampler
    if not seen.unequal_from:
        return f"{name} draws the same bits alone and with up to {seen.requests} requests at once."
    row = next(row for row in seen.rows if row.at_once == seen.unequal_from and row.unequal)
    from_what = f"from {row.at_once} requests at once on" if row.at_once > 1 else "even of a request alone"
    return (
        f"{name} does not repeat its own bits, {from_what}: drawn {row.way}, {row.unequal} of "
        f"{row.compared} requests differ from themselves alone, request {row.first.request} at position "
        f"{row.first.position}."
    )


def _hidden_by_truncation(measured: Measurements) -> str:
    """Ratios that a metric after truncation does not show; empty where there are none."""
    row = measured.corrections.cut[0]
    if not row.tokens or row.mean_ratio <= _HIDDEN * row.mean_truncated:
        return ""
    return (
        f"Metrics of truncated ratios hide a part of this: ratios reach "
        f"{measured.figures.token.ratio_max:.3g}, "
        f"and their mean is {row.mean_ratio:.3g}, but {row.mean_truncated:.3g} once they are cut at "
        f"{row.bound:g}."
    )


def _added_up(measured: Measurements) -> str:
    """Small differences that all have one sign; empty where a sequence is no worse off than its tokens."""
    for row in reversed(measured.corrections.cut):
        if row.sequences >= _MANY_SEQUENCES and row.tokens <= _FEW_TOKENS * row.sequences:
            length = measured.figures.tokens / measured.figures.sequences
            return (
                f"Small differences add up over the {length:.0f} tokens of a sequence: the ratio of a token "
                f"exceeds {row.bound:g} in {row.tokens:.2%} of the tokens, that of a sequence in "
                f"{row.sequences:.2%} of the sequences, which a correction of sequences would mask. "
                "Correct token by token, or by the geometric mean over a sequence."
            )
    return ""


def full_vocab_note(w: FullVocab | None, drawn_equal: bool) -> str:
    """What --full_vocab shows beyond the drawn tokens; empty where it was not asked for.

    drawn_equal: whether the drawn tokens have equal bits.
    """
    if not w:
        return ""
    if w.frac_places_equal == 1.0:
        return (
            f"The whole distributions are equal: {w.vocabulary:,} log-probabilities at each of "
            f"{w.places:,} places, bit for bit."
        )
    text = (
        f"Over the whole vocabulary, KL(sampler || trainer) is {_nats(w.kl_sampler_trainer)} and "
        f"KL(trainer || sampler) {_nats(w.kl_trainer_sampler)} nats a token; the likeliest token is the "
        f"same at {percent(w.same_first)} of {w.places:,} places."
    )
    if w.infinite_kl:
        text += f" At {w.infinite_kl:,} places one side cannot draw what the other can."
    if drawn_equal:
        text += " The drawn tokens alone do not show this."
    return text


def _nats(x: Estimate) -> str:
    return "unknown" if math.isnan(x.value) else f"{x.value:.3g}"


def _experts(measured: Measurements) -> str:
    """Where two sides choose other experts; empty in a dense model, and where they choose the same."""
    section = measured.log or measured.trace
    experts = section and section.experts
    if not experts or not experts.differ:
        return ""
    where = "the log" if measured.log else "the traced sequence"
    in_completion = "" if experts.sequence is None else f" of completion {experts.sequence}"
    return (
        f"{measured.sampler} and {measured.trainer} choose other experts at {experts.differ:,} of "
        f"{experts.places:,} places (a token in a layer) of {where}, first in layer "
        f"{experts.first_layer} at token {experts.first_token}{in_completion}."
    )


def _against(measured: Measurements) -> str:
    """What changed since an earlier audit; empty where none was named."""
    since = measured.against
    if not since:
        return ""
    names = [change.setting for change in since.changed]
    if not names:
        return f"Since {since.audit} no setting has changed."
    return f"Since {since.audit} {len(names)} settings have changed: {first_few(names, LISTED)}."


def _cut_off(measured: Measurements) -> list[str]:
    """Engines that cut outputs off where others round to the nearest number."""
    texts = []
    for engine, errors in ((measured.trace and measured.trace.own_errors) or {}).items():
        if ops := [e.op for e in errors if e.cut_off]:
            more = f" and {len(ops) - 1} further operations" if len(ops) > 1 else ""
            texts.append(
                f"{engine} cuts the outputs of {ops[0]}{more} off towards 0 and does not round them to the "
                "nearest number."
            )
    return texts


def _outside(measured: Measurements) -> str:
    outside = measured.figures.outside
    if not outside.tokens:
        return ""
    kept = kept_set(measured.assumed.distributions)
    where = f"outside the trainer's {kept} set" if kept else "where the trainer's probability is 0"
    lie = "lies" if outside.tokens == 1 else "lie"
    return (
        f"{outside.tokens:,} of {measured.figures.tokens:,} tokens {lie} {where}; the sampler gave them a "
        f"probability of {outside.mean_probability:.2g} on average, and has about {outside.share:.2%} of "
        "its mass there. KL(sampler || trainer) is infinite; its estimates are over the other tokens."
    )


def _infinite_ratios(measured: Measurements) -> str:
    infinite = measured.figures.infinite
    if not infinite.tokens:
        return ""
    return (
        f"{infinite.tokens:,} of {measured.figures.tokens:,} tokens have an infinite ratio: the sampler "
        "reported "
        "(almost) no probability for a token that it drew. They are left out of the estimates."
    )


def _negative(measured: Measurements) -> str:
    """A sampler's column that cannot be; empty where it can."""
    if not not_drawn_from(measured.figures):
        return ""
    k1 = measured.figures.k1
    if k1.value < 0.0:
        what = f"k1 is {k1.value:.2g} ± {k1.standard_error:.2g}: a KL cannot be negative"
    else:
        what = begun(f"{ratio_words(measured.figures.mean_ratio)}: it cannot be above 1")
    return f"{what}, so these log-probabilities are not of the distribution the tokens were drawn from."


def _below_one(measured: Measurements) -> str:
    """A trainer with mass where the sampler draws nothing; empty where the cause says so already."""
    ratio = measured.figures.mean_ratio
    named = measured.log and measured.log.distribution.fault
    if named or not mass_missing(ratio, measured.figures.tokens):
        return ""
    return (
        f"{begun(ratio_words(ratio))}, below 1: {1.0 - ratio.value:.2%} of the trainer's mass is on "
        "tokens that the sampler does not draw, outside of its top-p or top-k set, or on tokens too rare for "
        "so few."
    )
