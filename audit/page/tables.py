"""The figures of a report in words and rows: for the terminal, and for audit.html."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from ..settings import rows as setting_rows
from .token_texts import visible

Report = Mapping[str, Any]
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
HYPOTHESES = ("hypothesis", "what it says", "nats explained", "nats left", "lines")
# Headings of the checkpoints of a run.
STEP_FIGURES = ("step", "equal", "largest |d|", "k3", "perplexity", "bits part at", "tokens", "cause")
# Headings of what changed since an earlier audit.
AGAINST = ("setting or figure", "then", "now")
OPERATIONS = (
    "operation",
    "outputs that differ",
    "representable numbers apart",
    "largest difference",
    "relative rms",
)


def number(x: float | None, digits: int = 4) -> str:
    """A figure; "-" where there is none, since JSON has neither infinities nor NaN."""
    if x is None or math.isnan(x):
        return "-"
    return f"{x:.{digits}g}"


def summary_table(report: Report) -> Table:
    """The figures, as the command line prints them."""
    sampler = f"{report['sampler']} ({report['sampler_dtype']})"
    trainer = f"{report['trainer']} ({report['dtype']})"
    title = f"{sampler} against {trainer}"
    table = _table(
        ("figure", "value", "meaning"),
        [*figure_rows(report), *whole_rows(report), *own_rows(report), *position_rows(report)],
        title,
    )
    table.caption = PLUS_MINUS
    return table


def worst_table(report: Report) -> Table:
    """The tokens whose log-probabilities differ most, with their text, as the command line prints them."""
    return _table(WORST, worst_rows(report)[:5], "tokens farthest apart")


def settings_table(report: Report) -> Table:
    """What the audit assumed, as the command line prints it."""
    return _table(("assumed", "value"), setting_rows(report), "what these figures hold for")


def steps_table(report: Report) -> Table:
    """The checkpoints of a run, as the command line prints them."""
    title = f"{report['sampler']} against {report['trainer']}, by step of {report['run']}"
    shown = 6  # more columns would not fit a terminal of 80
    return _table(STEP_FIGURES[:shown], [cells[:shown] for cells in step_rows(report)], title)


def step_rows(report: Report) -> list[Row]:
    """The figures of each checkpoint of a run."""
    return [
        (
            str(r["step"]),
            percent(r["frac_equal"]),
            number(r["max_abs"], 3),
            number(r["k3"]["value"], 3),
            number(r["perplexity_sampler"], 3),
            r["bits_part_at"] or "-",
            f"{r['tokens']:,}",
            r["cause"]["kind"],
        )
        for r in report["steps"]
    ]


def hypotheses_table(report: Report) -> Table:
    """The hypotheses that come nearest to a log, as the command line prints them."""
    return _table(HYPOTHESES, hypothesis_rows(report)[:5], "what would explain the difference, nearest first")


def hypothesis_rows(report: Report) -> list[Row]:
    """Every hypothesis in its best form, the nearest to the log first."""
    return [
        (
            row["name"] + (" (fits)" if row["fits"] else ""),
            row["what"],
            number(row["explained"]),
            number(row["left"]),
            f"{row['lines']} of {row['lines_tried']}",
        )
        for row in report["hypotheses"]["rows"]
    ]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str) -> Table:
    table = Table(*headings, title=visible(title))
    for row in rows:
        table.add_row(*map(visible, row))
    return table


def worst_rows(report: Report) -> list[Row]:
    """The tokens farthest apart."""
    return [
        (
            str(w["sequence"]),
            str(w["position"]),
            quoted(w["before"]),
            quoted(w["text"]) if w["text"] else f"id {w['token']}",
            logprob(w["sampler"]),
            logprob(w["trainer"]),
        )
        for w in report["worst"]
    ]


def quoted(text: str) -> str:
    """A model's text in quotes, with nothing that a terminal would obey."""
    return f"'{visible(text)}'"


def logprob(x: float | None) -> str:
    """A log-probability. JSON holds null where it is minus infinity."""
    return "-inf" if x is None or math.isinf(x) else f"{x:.6f}"


def figure_rows(report: Report) -> list[Row]:
    """Name, value and meaning of the figures over all tokens."""
    rows = []
    if report.get("logged"):
        compared = f"{report['sequences']:,} of {report['logged']:,}"
        rows.append(("rollouts", compared, "compared, of those in the log; -n takes more or fewer"))
    ratio = report["mean_ratio"]
    rows.insert(0, ("mean ratio", _with_error(ratio), "of exp(trainer - sampler); 1 where both are sound"))
    for name, meaning in _MEANING.items():
        value = report[name]
        shown = (
            _with_error(value)
            if isinstance(value, dict)
            else f"{value:,}"
            if isinstance(value, int)
            else number(value, 6)
        )
        rows.append((name, shown, meaning))
        if name == "frac_equal":
            rows += _left_out_rows(report)
    for q, value in report["abs_percentiles"].items():
        rows.append((f"|d| p{q}", number(value), f"{q}% of the tokens differ by no more"))
    for level in ("token", "sequence"):
        rows += _ratio_rows(level, report[level])
    return rows


def whole_rows(report: Report) -> list[Row]:
    """The whole distributions, where they were compared (whole.py)."""
    w = report.get("whole")
    if not w:
        return []
    both = f"of {w['places']:,} places and {w['vocabulary']:,} tokens at each"
    kl = "sum over the vocabulary, mean over the places, in nats"
    where = f"in sequence {w['sequence']} at position {w['position']}, token {w['token']}"
    rows = [
        ("whole: places equal", percent(w["frac_places_equal"]), f"all log-probabilities equal; {both}"),
        (
            "whole: values equal",
            percent(w["frac_values_equal"]),
            "log-probabilities with equal bits",
        ),
        ("whole: largest |d|", number(w["max_abs"]), where if w["token"] is not None else "of any token"),
        ("whole: KL(s || t)", _with_error(w["kl_sampler_trainer"]), f"sampler to trainer: {kl}"),
        ("whole: KL(t || s)", _with_error(w["kl_trainer_sampler"]), f"trainer to sampler: {kl}"),
        (
            "whole: mass - 1",
            f"{number(w['mass_sampler'], 2)}, {number(w['mass_trainer'], 2)}",
            "sum of all probabilities, less 1: sampler and trainer, mean over the places",
        ),
        (
            "whole: variation",
            number(w["total_variation"]),
            f"mean total variation; largest {number(w['total_variation_max'])}",
        ),
        ("whole: likeliest", percent(w["same_first"]), "places with the same likeliest token"),
        (
            f"whole: top {w['top']}",
            percent(w["same_top"]),
            f"places with the same {w['top']} likeliest",
        ),
        (
            "whole: rank",
            percent(w["same_rank"]),
            "places where the drawn token has one rank on both sides; "
            f"it moves by {w['rank_change_max']:,} at most",
        ),
    ]
    if w["other_kept_set"]:
        rows.append(("whole: kept sets", f"{w['other_kept_set']:,}", "places where they cut other tokens"))
    return rows


def against_table(report: Report) -> Table:
    """What changed since an earlier audit, as the command line prints it."""
    return _table(AGAINST, against_rows(report), f"since {report['against']['audit']}")


def against_rows(report: Report) -> list[Row]:
    """Settings and figures that changed since an earlier audit."""
    found = report["against"]
    figures = [(name, number(x["before"]), number(x["now"])) for name, x in found["figures"].items()]
    return [*((c["setting"], c["before"], c["now"]) for c in found["changed"]), *figures]


def percent(share: float) -> str:
    """A share, never rounded up to 100%."""
    return f"{math.floor(1e4 * share) / 1e4:.2%}"


def _with_error(x: Mapping[str, float]) -> str:
    return f"{number(x['value'])} ± {number(x['standard_error'], 2)}"


def _left_out_rows(report: Report) -> list[Row]:
    """Tokens that the estimators leave out, where there are any."""
    meanings = {
        "outside": "tokens that the trainer cannot draw; the estimates below leave them out",
        "infinite": "tokens whose ratio is infinite; the estimates below leave them out",
    }
    return [
        (name, f"{report[name]['tokens']:,} ({report[name]['share']:.2%})", meaning)
        for name, meaning in meanings.items()
        if report[name]["tokens"]
    ]


def own_rows(report: Report) -> list[Row]:
    """Each engine against itself."""
    ways = [
        (
            f"{engine}: {way}",
            f"{figures['unequal']:,} of {figures['tokens']:,} unequal",
            f"largest difference {number(figures['max_abs'], 3)}",
        )
        for engine, ways in report["own_invariance"].items()
        for way, figures in ways.items()
    ]
    return ways + [
        (
            f"{report['sampler']}: {row['way']}",
            f"{row['unequal']:,} of {row['compared']:,} requests unequal",
            f"to the same prompt drawn alone; largest difference {number(row['max_abs'], 3)}",
        )
        for row in report.get("batch_invariance", {}).get("rows", [])
    ]


def position_rows(report: Report) -> list[Row]:
    """The difference by position in the completion. Positions count from 0."""
    rows = []
    for bucket in report["by_position"]:
        left_out = f"; {bucket['left_out']} left out" if bucket["left_out"] else ""
        meaning = f"mean |d| of {bucket['tokens']} tokens; largest {number(bucket['max_abs'], 3)}{left_out}"
        rows.append((f"position {position_name(bucket)}", number(bucket["mean_abs"]), meaning))
    return rows


def position_name(bucket: Mapping[str, Any]) -> str:
    """The positions of a row of by_position."""
    return f"{bucket['from']} to {bucket['to']}" if bucket["to"] > bucket["from"] else str(bucket["from"])


def _ratio_rows(level: str, ratios: Mapping[str, float]) -> list[Row]:
    """Name, value and meaning of the figures of the ratios of tokens, or of sequences."""
    return [
        (
            f"ratio, {level}",
            f"{number(ratios['ratio_min'], 6)} .. {number(ratios['ratio_max'], 6)}",
            f"exp(trainer - sampler) of a {level}, smallest and largest",
        ),
        (
            f"chi2, {level}",
            number(ratios["chi2"]),
            "variance of the ratio about 1: mean of (ratio - 1)^2",
        ),
        (
            f"ess, {level}",
            number(ratios["ess"], 6),
            "effective sample size of importance sampling, as a share",
        ),
    ]


def operation_rows(report: Report) -> list[Row]:
    """Every operation that both engines have, and the two own errors where they were measured."""
    own = [
        {e["op"]: f"{number(e['relative'], 2)} ({number(e['factor'], 2)}x)" for e in errors}
        for errors in report.get("own_errors", {}).values()
    ]
    return [
        (
            d["op"],
            f"{d['unequal']:,} of {d['elements']:,}",
            distance(d["max_ulp"]),
            number(d["max_abs"], 3),
            number(d["relative"], 3),
            *(errors.get(d["op"], "-") for errors in own),
        )
        for d in report["operations"]
    ]


def distance(max_ulp: int | None) -> str:
    """A distance in representable numbers; a large one says nothing (bitwise.ulp_words)."""
    if max_ulp is None:
        return "-"
    return f"{max_ulp:,}" if max_ulp <= 1 << 20 else "more than 2^20"
