"""The figures of a report in words and rows: for the terminal, and for audit.html."""

from ...verify.mismatch import Estimate
from ..figures.measure import Bucket, Spread
from ..hypotheses.tried import Tried
from ..report import Report
from ..run_report import RunReport
from ..sections import FullVocab
from ..settings import distribution_words
from .numbers import distance, estimate, logprob, number, percent, quoted

Row = tuple[str, ...]

# Name in the report -> its meaning.
_MEANING = {
    "tokens": "completion tokens compared",
    "frac_equal": "share of them whose two log-probabilities have the same bits",
    "max_abs": "largest |trainer - sampler| of a token's log-probability",
    "k1": "mean of sampler - trainer; estimates KL(sampler || trainer), unbiased, noisy",
    "k2": "mean of half the squared difference",
    "k3": "mean of ratio - 1 - log ratio; estimates the same KL, never negative",
    "perplexity_sampler": "exp of the sampler's mean negative log-probability",
    "perplexity_trainer": "exp of the trainer's mean negative log-probability",
}
# What ± means in every table, on the page and in the terminal.
PLUS_MINUS = (
    "± is the standard error of a mean over tokens. Sequences are its clusters: the tokens of one may depend "
    "on each other."
)
# Headings of the tokens that differ most.
WORST = ("sequence", "position", "text before", "token", "sampler", "trainer")
# Headings of the hypotheses about a log, in nats a token.
HYPOTHESES = ("hypothesis", "what it says", "nats explained", "nats left", "lines", "candidates")
# Headings of the checkpoints of a run.
_STEP_FIGURES = ("step", "equal", "largest |d|", "k3", "perplexity", "bits part at", "tokens", "cause")
# Headings of what changed since an earlier audit.
AGAINST = ("setting or figure", "then", "now")
OPERATIONS = (
    "operation",
    "outputs that differ",
    "representable numbers apart",
    "largest difference",
    "relative rms",
)


def key_rows(report: Report) -> list[Row]:
    """Name, value and meaning of the three figures that answer how far the two are apart."""
    figures = report.shown.figures
    k3 = figures.k3
    return [
        ("equal to the bit", percent(figures.frac_equal), f"of {figures.tokens:,} tokens"),
        ("largest difference", number(figures.max_abs, 3), "nats, of a token's log-probability"),
        (
            "KL(sampler || trainer)",
            number(k3.value, 2),
            f"nats a token (k3), ± {number(k3.standard_error, 2)}",
        ),
    ]


def figure_rows(report: Report) -> list[Row]:
    """Name, value and meaning of the figures over all tokens."""
    figures = report.shown.figures
    meaning = "of exp(trainer - sampler); 1 where both are sound"
    rows = [("mean ratio", estimate(figures.mean_ratio), meaning)]
    if report.log:
        compared = f"{figures.sequences:,} of {report.log.logged:,}"
        rows.append(("rollouts", compared, "compared, of those in the log; -n takes more or fewer"))
    for name, meaning in _MEANING.items():
        value = getattr(figures, name)
        rows.append((name, _shown(value), meaning))
        if name == "frac_equal":
            rows += _left_out_rows(report)
    for q, value in figures.abs_percentiles.items():
        rows.append((f"|d| p{q}", number(value), f"{q}% of the tokens differ by no more"))
    return [*rows, *_ratio_rows("token", figures.token), *_ratio_rows("sequence", figures.sequence)]


def _shown(value: Estimate | float | int) -> str:
    if isinstance(value, Estimate):
        return estimate(value)
    return f"{value:,}" if isinstance(value, int) else number(value, 6)


def _left_out_rows(report: Report) -> list[Row]:
    """Tokens that the estimators leave out, where there are any."""
    rows = (
        (
            "outside",
            report.shown.figures.outside,
            "tokens that the trainer cannot draw; the estimates below leave them out",
        ),
        (
            "infinite",
            report.shown.figures.infinite,
            "tokens whose ratio is infinite; the estimates below leave them out",
        ),
    )
    return [(name, f"{x.tokens:,} ({x.share:.2%})", meaning) for name, x, meaning in rows if x.tokens]


def _ratio_rows(level: str, ratios: Spread) -> list[Row]:
    """Name, value and meaning of the figures of the ratios of tokens, or of sequences."""
    return [
        (
            f"ratio, {level}",
            f"{number(ratios.ratio_min, 6)} .. {number(ratios.ratio_max, 6)}",
            f"exp(trainer - sampler) of a {level}, smallest and largest",
        ),
        (
            f"chi2, {level}",
            number(ratios.chi2),
            "variance of the ratio about 1: mean of (ratio - 1)^2",
        ),
        (
            f"ess, {level}",
            number(ratios.ess, 6),
            "effective sample size of importance sampling, as a share",
        ),
    ]


def full_vocab_rows(w: FullVocab | None) -> list[Row]:
    """The whole vocabulary, where it was compared (figures/full_vocab.py)."""
    if not w:
        return []
    both = f"of {w.places:,} places and {w.vocabulary:,} tokens at each"
    kl = "sum over the vocabulary, mean over the places, in nats"
    where = f"in sequence {w.sequence} at position {w.position}, token {w.token}"
    moves = f"it moves by {w.rank_change_max:,} at most"
    rows = [
        ("vocab: places equal", percent(w.frac_places_equal), f"all log-probabilities equal; {both}"),
        ("vocab: values equal", percent(w.frac_values_equal), "log-probabilities with equal bits"),
        ("vocab: largest |d|", number(w.max_abs), where if w.token is not None else "of any token"),
        ("vocab: KL(s || t)", estimate(w.kl_sampler_trainer), f"sampler to trainer: {kl}"),
        ("vocab: KL(t || s)", estimate(w.kl_trainer_sampler), f"trainer to sampler: {kl}"),
        (
            "vocab: mass - 1",
            f"{number(w.mass_sampler, 2)}, {number(w.mass_trainer, 2)}",
            "sum of all probabilities, less 1: sampler and trainer, mean over the places",
        ),
        (
            "vocab: variation",
            number(w.total_variation),
            f"mean total variation; largest {number(w.total_variation_max)}",
        ),
        ("vocab: likeliest", percent(w.same_first), "places with the same likeliest token"),
        (f"vocab: top {w.top}", percent(w.same_top), f"places with the same {w.top} likeliest"),
        (
            "vocab: rank",
            percent(w.same_rank),
            f"places where the drawn token has one rank on both sides; {moves}",
        ),
    ]
    if w.other_kept_set:
        rows.append(("vocab: kept sets", f"{w.other_kept_set:,}", "places where they cut other tokens"))
    return rows


def own_rows(report: Report) -> list[Row]:
    """Each engine against itself."""
    ways = [
        (
            f"{engine}: {way}",
            f"{figures.unequal:,} of {figures.tokens:,} unequal",
            f"largest difference {number(figures.max_abs, 3)}",
        )
        for engine, ways in report.own_invariance.items()
        for way, figures in ways.items()
    ]
    rows = report.batch_invariance.rows if report.batch_invariance else []
    return ways + [
        (
            f"{report.sampler}: {row.way}",
            f"{row.unequal:,} of {row.compared:,} requests unequal",
            f"to the same prompt drawn alone; largest difference {number(row.max_abs, 3)}",
        )
        for row in rows
    ]


def position_rows(report: Report) -> list[Row]:
    """The difference by position in the completion. Positions count from 0."""
    rows = []
    for bucket in report.shown.figures.by_position:
        left_out = f"; {bucket.left_out} left out" if bucket.left_out else ""
        meaning = f"mean |d| of {bucket.tokens} tokens; largest {number(bucket.max_abs, 3)}{left_out}"
        rows.append((f"position {position_name(bucket)}", number(bucket.mean_abs), meaning))
    return rows


def position_name(bucket: Bucket) -> str:
    """The positions of a row of by_position."""
    return f"{bucket.first} to {bucket.last}" if bucket.last > bucket.first else str(bucket.first)


def worst_rows(report: Report) -> list[Row]:
    """The tokens farthest apart."""
    return [
        (
            str(w.sequence),
            str(w.position),
            quoted(w.before),
            quoted(w.text) if w.text else f"id {w.token}",
            logprob(w.sampler),
            logprob(w.trainer),
        )
        for w in report.shown.worst
    ]


def hypothesis_rows(report: Report) -> list[Row]:
    """Every hypothesis in its best form, the nearest to the log first; none where none was tried.

    None either where a fault is named and none of them explains a part of the difference.
    """
    rows = _tried(report).rows if report.log else []
    if report.outcome.faults and not any(row.explained > 0 for row in rows):
        return []
    return [
        (
            row.name + (" (fits)" if row.fits else ""),
            row.what,
            number(row.explained),
            number(row.left),
            f"{row.lines} of {row.lines_tried}",
            f"{row.candidates:,}",
        )
        for row in rows
    ]


def _tried(report: Report) -> Tried:
    """What was tried on the column that the cause is about."""
    trainer = report.cause.trainer_column and report.log.trainer_column
    return trainer or report.log.hypotheses


def operation_rows(report: Report) -> list[Row]:
    """Every operation that both engines have, and the two own errors where they were measured."""
    errors_by_op = [
        {e.op: f"{number(e.relative, 2)} ({number(e.factor, 2)}x)" for e in errors}
        for errors in (report.trace.own_errors or {}).values()
    ]
    return [
        (
            d.op,
            f"{d.unequal:,} of {d.elements:,}",
            distance(d.max_ulp),
            number(d.max_abs, 3),
            number(d.relative, 3),
            *(errors.get(d.op, "-") for errors in errors_by_op),
        )
        for d in report.trace.operations
    ]


def against_rows(report: Report) -> list[Row]:
    """Settings and figures that changed since an earlier audit."""
    since = report.against
    figures = [(name, number(x.before), number(x.now)) for name, x in since.figures.items()]
    return [*((c.setting, c.before, c.now) for c in since.changed), *figures]


def step_figures(report: RunReport) -> Row:
    """The headings of step_rows."""
    if not report.bar:
        return _STEP_FIGURES
    bar = (report.bar.figure,) if report.bar.name else ()
    return ("step", *bar, "k3", "largest |d|", "tokens", "outcome", "completions", "equal")


def step_rows(report: RunReport) -> list[Row]:
    """The figures of each checkpoint of a run, or of each step of a log."""
    if report.bar:
        return [
            (
                str(r.step),
                *([number(r.bar, 4)] if report.bar.name else []),
                number(r.k3.value, 3),
                number(r.max_abs, 3),
                f"{r.tokens:,}",
                r.outcome.words,
                f"{r.completions:,}",
                percent(r.frac_equal),
            )
            for r in report.steps
        ]
    return [
        (
            str(r.step),
            percent(r.frac_equal),
            number(r.max_abs, 3),
            number(r.k3.value, 3),
            number(r.perplexity_sampler, 3),
            r.bits_part_at or "-",
            f"{r.tokens:,}",
            r.cause.kind,
        )
        for r in report.steps
    ]


def setting_rows(report: Report | RunReport) -> list[Row]:
    """Name and value of everything that was assumed, in words."""
    assumed, source = report.assumed, report.assumed.source
    engines = report.engines if isinstance(report, Report) else None
    rows = [("model", report.model)]
    if isinstance(report, Report) and report.trainer_model:
        rows = [("sampler's model", report.model), ("trainer's model", report.trainer_model)]
    rows += [
        ("tokens were drawn", distribution_words(assumed.distributions)),
        ("sampler", f"{report.sampler}, {assumed.dtypes.words('sampler')}"),
        ("trainer", f"{report.trainer}, {assumed.dtypes.words('trainer')}"),
        ("device", assumed.device),
    ]
    names = ("seed", "prompts", "log", "weight_version", "max_tokens")
    values = ((name, getattr(source, name)) for name in names)
    rows += [(name.replace("_", " "), str(value)) for name, value in values if value is not None]
    if engines:
        rows += [
            (f"{where}'s {name}", value)
            for where, settings in engines.engine_settings.items()
            for name, value in settings.items()
            if where != "machine"
        ]
        machine = engines.engine_settings["machine"]
        rows.append(("machine", ", ".join(f"{name} {value}" for name, value in machine.items())))
        rows.append(("fingerprint of the settings", engines.settings_fingerprint[:16]))
    return [*rows, ("versions", ", ".join(f"{name} {v}" for name, v in assumed.versions.items()))]
