"""The audit in words: equal or not, where bits part, where the error jumps, the cause, what to do."""

import math

from ...verify.distance import ulp_words
from ..page.numbers import percent
from ..report import Measurements, Report
from .causes import EQUAL_COLUMNS


def verdict(report: Report) -> str:
    """The audit in a few lines, for a terminal."""
    sentences = [headline(report), parting(report), jump(report), *report.notes]
    if report.cause.kind == EQUAL_COLUMNS:
        sentences += [f"The log: {report.cause.text}", f"What to do: {report.cause.remedy}"]
    elif report.cause.kind != "equal":
        sentences += [f"{cause_heading(report)}: {report.cause.text}", f"What to do: {report.cause.remedy}"]
    return "\n".join(filter(None, sentences))


def cause_heading(report: Report) -> str:
    """What stands over the cause. Two columns without a model show a suspicion."""
    return "Suspicion, without a model" if report.cause.suspicion else "Likely cause"


def headline(report: Report) -> str:
    """The tokens with equal bits, and how far the others are apart."""
    sampler, trainer, figures, *_ = report.shown
    tokens = f"{figures.tokens:,} tokens{_of_file(report, figures.tokens)}"
    if figures.equal:
        return f"All {tokens} have the same log-probability, bit for bit, in {sampler} and in {trainer}."
    text = f"{sampler} and {trainer} agree to the bit on {percent(figures.frac_equal)} of {tokens}"
    if not figures.known:
        return f"{text}; no token has a finite ratio."
    scope = f" Over the {figures.known:,} with a finite ratio," if figures.known < figures.tokens else ""
    return (
        f"{text}{'.' if scope else ';'}{scope} the largest difference of a log-probability is "
        f"{figures.max_abs:.3g}, and KL(sampler || trainer) is about {figures.k3.value:.2g} nats a "
        "token."
    )


def _of_file(report: Report, tokens: int) -> str:
    """That a part of a log was compared, so many tokens; empty where it was all of it."""
    if not report.log or report.log.drawn_tokens == tokens:
        return ""
    return f" (of {report.log.drawn_tokens:,} drawn ones in the file)"


def parting(measured: Measurements) -> str:
    """Where bits first part; empty where nothing was traced, and where all is equal."""
    first = measured.trace and measured.trace.first_divergence
    if not first:
        return ""
    distance = ulp_words(first.max_ulp)
    size = f", by up to {distance}" if distance else f", by {first.relative:.2g} of their size"
    share = f"{first.unequal:,} of its {first.elements:,} outputs"
    return f"Bits first part at {first.op}: {share} differ{size}."


def jump(measured: Measurements) -> str:
    """Where the error jumps; empty where nothing was judged."""
    trace = measured.trace
    if trace is None or trace.own_errors is None:
        return ""
    if trace.jump is None:
        return "The error jumps nowhere: every operation does what the checkpoint says, and rounds."
    factor = "infinitely many" if math.isinf(trace.jump.factor) else f"{trace.jump.factor:,.0f}"
    size = "" if math.isinf(trace.jump.relative) else f" is {trace.jump.relative:.2g} of their size,"
    return (
        f"The error jumps at {trace.jump.op} of {trace.jump.engine}: from the same inputs, the error of its "
        f"outputs{size} {factor} times what {trace.jump.dtype} rounds."
    )
