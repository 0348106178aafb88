"""Sentences of an audit beside its verdict: what the figures alone would not tell."""

from collections.abc import Mapping
from typing import Any

from ..figures.drawn_from import mass_missing, ratio_words
from ..figures.measure import equal
from ..page.tables import percent
from ..settings import kept_set
from .faults import not_drawn_from
from .log_findings import log_notes

Report = Mapping[str, Any]

# The mean ratio from which truncation hides something, as a multiple of the truncated mean.
_HIDDEN = 1.05
# Sequences that a correction masks, as a share, and tokens as a share of those.
_MANY_SEQUENCES, _FEW_TOKENS = 0.1, 0.1
# Changed settings that a sentence lists.
LISTED = 4


def notes(report: Report) -> list[str]:
    """What the figures alone would not tell."""
    texts = (
        _outside(report),
        _infinite_ratios(report),
        _negative(report),
        _below_one(report),
        _hidden_by_truncation(report),
        _added_up(report),
        *_cut_off(report),
        _whole(report),
        _against(report),
        _batch_invariance(report),
        *log_notes(report),
    )
    return [text for text in texts if text]


def _batch_invariance(report: Report) -> str:
    """What `--own` found, in a sentence; empty where it was not asked for."""
    found = report.get("batch_invariance")
    if not found:
        return ""
    name = report["sampler"]
    if not found["unequal_from"]:
        return f"{name} draws the same bits alone and with up to {found['requests']} requests at once."
    row = next(row for row in found["rows"] if row["at_once"] == found["unequal_from"] and row["unequal"])
    request, position = row["first"]["request"], row["first"]["position"]
    from_what = (
        f"from {row['at_once']} requests at once on" if row["at_once"] > 1 else "even of a request alone"
    )
    return (
        f"{name} does not repeat its own bits, {from_what}: drawn {row['way']}, {row['unequal']} of "
        f"{row['compared']} requests differ from themselves alone, request {request} at position {position}."
    )


def _hidden_by_truncation(report: Report) -> str:
    """Ratios that a metric after truncation does not show; empty where there are none."""
    row = report.get("corrections", {}).get("cut", [None])[0]
    if not row or not row["tokens"] or row["mean_ratio"] <= _HIDDEN * row["mean_truncated"]:
        return ""
    return (
        f"Metrics of truncated ratios hide a part of this: ratios reach {report['token']['ratio_max']:.3g}, "
        f"and their mean is {row['mean_ratio']:.3g}, but {row['mean_truncated']:.3g} once they are cut at "
        f"{row['bound']:g}."
    )


def _added_up(report: Report) -> str:
    """Small differences that all have one sign; empty where a sequence is no worse off than its tokens."""
    for row in reversed(report.get("corrections", {}).get("cut", [])):
        if row["sequences"] >= _MANY_SEQUENCES and row["tokens"] <= _FEW_TOKENS * row["sequences"]:
            length = report["tokens"] / report["sequences"]
            return (
                f"Small differences add up over the {length:.0f} tokens of a sequence: the ratio of a token "
                f"exceeds {row['bound']:g} in {row['tokens']:.2%} of the tokens, that of a sequence in "
                f"{row['sequences']:.2%} of the sequences, which a correction of sequences would mask. "
                "Correct token by token, or by the geometric mean over a sequence."
            )
    return ""


def _whole(report: Report) -> str:
    """What --full found beyond the drawn tokens; empty where it was not asked for."""
    w = report.get("whole")
    if not w:
        return ""
    if w["frac_places_equal"] == 1.0:
        return (
            f"The whole distributions are equal: {w['vocabulary']:,} log-probabilities at each of "
            f"{w['places']:,} places, bit for bit."
        )
    text = (
        f"Over the whole vocabulary, KL(sampler || trainer) is {_nats(w['kl_sampler_trainer'])} and "
        f"KL(trainer || sampler) {_nats(w['kl_trainer_sampler'])} nats a token; the likeliest token is the "
        f"same at {percent(w['same_first'])} of {w['places']:,} places."
    )
    if w["infinite_kl"]:
        text += f" At {w['infinite_kl']:,} places one side cannot draw what the other can."
    if equal(report):
        text += " The drawn tokens alone do not show this."
    return text


def _nats(x: Mapping[str, float | None]) -> str:
    return "unknown" if x["value"] is None else f"{x['value']:.3g}"


def _against(report: Report) -> str:
    """What changed since an earlier audit; empty where none was named."""
    found = report.get("against")
    if not found:
        return ""
    names = [c["setting"] for c in found["changed"]]
    if not names:
        return f"Since {found['audit']} no setting has changed."
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"Since {found['audit']} {len(names)} settings have changed: {', '.join(names[:LISTED])}{more}."


def _cut_off(report: Report) -> list[str]:
    """Engines that cut outputs off where others round to the nearest number."""
    texts = []
    for engine, errors in report.get("own_errors", {}).items():
        if ops := [e["op"] for e in errors if e["cut_off"]]:
            more = f" and {len(ops) - 1} further operations" if len(ops) > 1 else ""
            texts.append(
                f"{engine} cuts the outputs of {ops[0]}{more} off towards 0 and does not round them to the "
                "nearest number."
            )
    return texts


def _outside(report: Report) -> str:
    found = report.get("outside", {"tokens": 0})
    if not found["tokens"]:
        return ""
    kept = kept_set(report.get("assumed", {}).get("distributions", []))
    where = f"outside the trainer's {kept} set" if kept else "where the trainer's probability is 0"
    lie = "lies" if found["tokens"] == 1 else "lie"
    return (
        f"{found['tokens']:,} of {report['tokens']:,} tokens {lie} {where}; the sampler gave them a "
        f"probability of {found['mean_probability']:.2g} on average, and has about {found['share']:.2%} of "
        "its mass there. KL(sampler || trainer) is infinite; its estimates are over the other tokens."
    )


def _infinite_ratios(report: Report) -> str:
    found = report.get("infinite", {"tokens": 0})
    if not found["tokens"]:
        return ""
    return (
        f"{found['tokens']:,} of {report['tokens']:,} tokens have an infinite ratio: the sampler reported "
        "(almost) no probability for a token that it drew. They are left out of the estimates."
    )


def _negative(report: Report) -> str:
    """A sampler's column that cannot be; empty where nothing was measured, as over the steps of a run."""
    if "mean_ratio" not in report or not not_drawn_from(report):
        return ""
    k1 = report["k1"]
    if k1["value"] is not None and k1["value"] < 0.0:
        what = f"k1 is {k1['value']:.2g} ± {k1['standard_error']:.2g}: a KL cannot be negative"
    else:
        what = f"{ratio_words(report['mean_ratio'])}: it cannot be above 1".capitalize()
    return f"{what}, so these log-probabilities are not of the distribution the tokens were drawn from."


def _below_one(report: Report) -> str:
    """A trainer with mass where the sampler draws nothing; empty where the cause says so already."""
    ratio = report.get("mean_ratio")
    if not ratio or report.get("distribution", {}).get("found") or not mass_missing(ratio, report["tokens"]):
        return ""
    return (
        f"{ratio_words(ratio).capitalize()}, below 1: {1.0 - ratio['value']:.2%} of the trainer's mass is on "
        "tokens that the sampler does not draw, outside of its top-p or top-k set, or on tokens too rare for "
        "so few."
    )
