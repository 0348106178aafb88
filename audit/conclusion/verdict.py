"""The audit in words: equal or not, where bits part, where the error jumps, the cause, what to do."""

import math
from collections.abc import Mapping
from typing import Any

from ...verify.bitwise import ulp_words
from ..figures.measure import equal
from ..page.tables import percent
from .causes import EQUAL_COLUMNS

Report = Mapping[str, Any]


def verdict(report: Report) -> str:
    """The audit in a few lines, for a terminal."""
    sentences = [headline(report), parting(report), jump(report), *report["notes"]]
    found = report["cause"]
    if found["kind"] == EQUAL_COLUMNS:
        sentences += [f"The log: {found['text']}", f"What to do: {found['remedy']}"]
    elif found["kind"] != "equal":
        sentences += [f"Likely cause: {found['text']}", f"What to do: {found['remedy']}"]
    return "\n".join(filter(None, sentences))


def headline(report: Report) -> str:
    """Equal or not, and how far apart."""
    sampler, trainer = report["sampler"], report["trainer"]
    if equal(report):
        return (
            f"All {report['tokens']:,} tokens have the same log-probability, bit for bit, "
            f"in {sampler} and in {trainer}."
        )
    share = percent(report["frac_equal"])
    text = f"{sampler} and {trainer} agree to the bit on {share} of {report['tokens']:,} tokens"
    if not _known(report):
        return f"{text}; no token has a finite ratio."
    known = _known(report)
    scope = f" Over the {known:,} with a finite ratio," if known < report["tokens"] else ""
    return (
        f"{text}{'.' if scope else ';'}{scope} the largest difference of a log-probability is "
        f"{report['max_abs']:.3g}, and KL(sampler || trainer) is about {report['k3']['value']:.2g} nats a "
        "token."
    )


def _known(report: Report) -> int:
    """Tokens whose ratio is neither 0 nor infinite: the estimators are over them."""
    return report["tokens"] - sum(report.get(name, {}).get("tokens", 0) for name in ("outside", "infinite"))


def parting(report: Report) -> str:
    """Where bits first part; empty where nothing was traced, and where all is equal."""
    first = report.get("first_divergence")
    if not first:
        return ""
    distance = ulp_words(first["max_ulp"])
    size = f", by up to {distance}" if distance else f", by {first['relative']:.2g} of their size"
    share = f"{first['unequal']:,} of its {first['elements']:,} outputs"
    return f"Bits first part at {first['op']}: {share} differ{size}."


def jump(report: Report) -> str:
    """Where the error jumps; empty where nothing was judged."""
    if "own_errors" not in report:
        return ""
    found = report["jump"]
    if found is None:
        return "The error jumps nowhere: every operation does what the checkpoint says, and rounds."
    factor = "infinitely many" if _infinite(found["factor"]) else f"{found['factor']:,.0f}"
    own = "" if _infinite(found["relative"]) else f" is {found['relative']:.2g} of their size,"
    return (
        f"The error jumps at {found['op']} of {found['engine']}: from the same inputs, the error of its "
        "outputs"
        f"{own} {factor} times what {found['dtype']} rounds."
    )


def _infinite(x: float | None) -> bool:
    return x is None or math.isinf(x)
