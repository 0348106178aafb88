"""audit.html: one file whose first screen answers: sound or at fault, why, what to do, how far, and one plot.

All else is folded below: what was tried, figures, tokens, operations, settings. The page has no script and
loads nothing; its policy forbids both, so that text of a model stays text. It is drawn from the report alone.
"""

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ...verify.bias_figures import DrawnBias
from ..conclusion.outcome import Outcome
from ..conclusion.verdict import cause_heading, headline, jump, parting
from ..report import Report
from ..run_report import RunReport
from ..sections import TraceSection
from ..sentence import begun
from .gradient import LEGEND, LOSSES, drawn_from, layer_headings, layer_rows, loss_rows
from .numbers import logprob
from .plots import operations_plot, positions_plot, ratios_plot, steps_plot
from .rows import (
    AGAINST,
    HYPOTHESES,
    OPERATIONS,
    PLUS_MINUS,
    STEP_FIGURES,
    WORST,
    against_rows,
    figure_rows,
    full_vocab_rows,
    hypothesis_rows,
    key_rows,
    operation_rows,
    own_rows,
    position_rows,
    setting_rows,
    step_rows,
    worst_rows,
)
from .style import POLICY, STYLE
from .token_texts import SequenceTexts
from .visible import visible

# |trainer - sampler| from which a token has the next colour.
STEPS = (1e-4, 1e-3, 1e-2, 0.1, 1.0)
_SECTIONS = {
    "cause": "Likely cause",
    "tried": "What was tried",
    "figures": "Figures",
    "tokens": "Tokens",
    "operations": "Operations",
    "gradient": "Gradient",
    "settings": "Settings",
}


def page(report: Report) -> str:
    """The whole page."""
    title = f"{report.shown.sampler} against {report.shown.trainer}"
    folded = {
        "tried": _hypotheses(report),
        "figures": _figures(report),
        "tokens": _tokens(report),
        "operations": _operations(report, report.trace) if report.trace else "",
        "gradient": _gradient(report.gradient) if report.gradient else "",
        "settings": _settings(report),
    }
    return _document(title, report.outcome, headline(report), _first_screen(report), folded)


def run_page(report: RunReport, sentences: Sequence[str]) -> str:
    """The page over the checkpoints of a run. sentences: what it says, the first one beside the outcome."""
    title = f"{report.run}: {report.sampler} against {report.trainer}"
    rows = report.steps
    body = "" if all(r.frac_equal == 1.0 for r in rows) else _figure(steps_plot(rows))
    head = "".join(f'<th scope="col">{_text(h)}</th>' for h in (*STEP_FIGURES, "report"))
    links = (f'<td><a href="step-{r.step:06d}/audit.html">step {r.step}</a></td>' for r in rows)
    cells = ("".join(map(_cell, cells)) for cells in step_rows(report))
    body += _table_of(head, (x + link for x, link in zip(cells, links, strict=True)))
    text = "".join(f"<p>{_text(sentence)}</p>" for sentence in sentences[1:] or sentences)
    shown = (
        f'<section id="cause" tabindex="-1">{_card("Likely cause", text)}{_card("By step", body)}</section>'
    )
    return _document(title, report.outcome, sentences[0], shown, {"settings": _settings(report)})


def _settings(report: Report | RunReport) -> str:
    body = _table(("assumed", "value"), setting_rows(report))
    if isinstance(report, Report) and report.against:
        body += f"<h3>Since {_text(report.against.audit)}</h3>" + _table(AGAINST, against_rows(report))
    return body


def _document(title: str, outcome: Outcome, sentence: str, first: str, folded: dict[str, str]) -> str:
    """A page. title and sentence are text. first is HTML, and so is what is folded, by section."""
    folded = {name: body for name, body in folded.items() if body}
    links = "".join(f'<li><a href="#{name}">{_SECTIONS[name]}</a></li>' for name in ("cause", *folded))
    sections = "".join(_folded(name, body) for name, body in folded.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{POLICY}'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{_text(title)} - zerokl audit</title><style>{STYLE}</style></head><body>"
        '<a class="skip" href="#cause">Skip to the cause</a><div class="bar"><span class="brand">'
        f'zerokl <b>audit</b></span><nav aria-label="Sections"><ul>{links}</ul></nav></div>'
        f"<header><h1>{_text(title)}</h1>{_answer(outcome, sentence)}</header>"
        f"<main>{first}{sections}</main></body></html>\n"
    )


def _text(x: object) -> str:
    """Anything as inert text of a page: nothing unprintable, no markup."""
    return html.escape(visible(str(x)))


def _folded(name: str, body: str) -> str:
    """A section that opens on demand, and by a link to what is in it."""
    heading = f"<summary><h2>{_SECTIONS[name]}</h2></summary>"
    inside = f'<div id="{name}" class="inside" tabindex="-1">{body}</div>'
    return f'<section class="card"><details>{heading}{inside}</details></section>'


def _answer(outcome: Outcome, sentence: str) -> str:
    """The outcome in its colour, and a sentence below."""
    sign = f'<span aria-hidden="true">{outcome.sign}</span>'
    words = f'<p class="answer {outcome.css_class}">{sign} {_text(outcome.words)}</p>'
    return f'<div class="card verdict {outcome.css_class}">{words}<p>{_text(begun(sentence))}</p></div>'


def _first_screen(report: Report) -> str:
    """The cause and what to do, three figures and a plot, and the notes, folded."""
    text = begun(report.cause.text)
    sentences = [*filter(None, (parting(report), jump(report))), *report.notes, *report.log_notes]
    notes = "".join(f"<li>{_text(s)}</li>" for s in sentences)
    count = f"{len(sentences)} note{'s' * (len(sentences) != 1)}"
    body = (
        f'<p class="cause">{_text(text)}</p><p><strong>What to do:</strong> {_text(report.cause.remedy)}</p>'
    )
    if notes:
        body += f"<details><summary>{count} beside it</summary><ul>{notes}</ul></details>"
    cards = "".join(_key_figure(*row) for row in key_rows(report))
    plot = _main_plot(report)
    plot = f'<div class="card plot">{plot}</div>' if plot else ""
    return (
        f'<section id="cause" class="screen" tabindex="-1">{_card(cause_heading(report), body)}'
        f'<div class="keys">{cards}</div>{plot}</section>'
    )


def _card(heading: str, body: str) -> str:
    return f'<div class="card"><h2>{heading}</h2>{body}</div>'


def _key_figure(name: str, value: str, meaning: str) -> str:
    parts = ((name, "name"), (value, "value"), (meaning, "note"))
    return f'<div class="card key">{"".join(f"<p class={c}>{_text(x)}</p>" for x, c in parts)}</div>'


def _main_plot(report: Report) -> str:
    """Where two engines part, operation by operation; of a log, where in a completion; nothing if equal."""
    figures = report.shown.figures
    if figures.equal:
        return ""
    return operations_plot(report.trace) if report.trace else positions_plot(figures.by_position)


def _hypotheses(report: Report) -> str:
    """What was tried on a log, the nearest first; empty where nothing was."""
    if not (rows := hypothesis_rows(report)):
        return ""
    return "<p>What would explain the difference, nearest first.</p>" + _table(HYPOTHESES, rows)


def _figures(report: Report) -> str:
    headings = ("figure", "value", "meaning")
    body = _table(headings, figure_rows(report)) + f"<p>{_text(PLUS_MINUS)}</p>"
    if rows := full_vocab_rows(report.full_vocab):
        body += "<h3>The whole vocabulary</h3>" + _table(headings, rows)
    body += "<h3>Each engine against itself</h3>" + _table(headings, own_rows(report))
    body += "<h3>By position in the completion, from 0</h3>"
    figures = report.shown.figures
    if not figures.equal and report.trace:
        body += _figure(positions_plot(figures.by_position))
    body += _table(headings, position_rows(report))
    if not figures.equal:
        body += "<h3>Ratios</h3>" + _figure(ratios_plot(figures.ratio_histogram))
    return body


def _gradient(found: DrawnBias) -> str:
    body = f"<p>{_text(drawn_from(found))}</p>" + _table(LOSSES, loss_rows(found.losses))
    body += f"<p>{_text(LEGEND)}</p><h3>By layer</h3>"
    return body + _table(layer_headings(found), layer_rows(found))


def _figure(svg: str) -> str:
    return f"<figure>{svg}</figure>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(h)}</th>' for h in headings)
    return _table_of(head, ("".join(map(_cell, row)) for row in rows))


def _cell(x: str) -> str:
    """A cell; short figures do not break."""
    short = ' class="n"' if x[:1] in "-0123456789" and len(x) < 24 else ""
    return f"<td{short}>{_text(x)}</td>"


def _table_of(head: str, rows: Iterable[str]) -> str:
    """A table of rows of cells that are HTML already. A wide one scrolls by itself, by keyboard too."""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide" tabindex="0">{table}</div>'


# --- tokens ---


def _tokens(report: Report) -> str:
    *_, worst, texts = report.shown
    linked = {(w.sequence, w.position) for w in worst}
    opened = {(worst[0] if worst else texts.sequences[0]).sequence}
    body = _legend() + (_worst(report) if worst else "<p>Every token is equal to the bit.</p>")
    body += "".join(_sequence(s, linked, s.sequence in opened) for s in texts.sequences)
    if texts.left_out:
        body += f"<p>{texts.left_out:,} further sequences are left out here; the figures hold them.</p>"
    return body


def _legend() -> str:
    names = ["equal", "below 0.0001", *(f"{step:g} and more" for step in STEPS), "impossible for one side"]
    marks = "".join(f'<span class="t d{i}">{name}</span> ' for i, name in enumerate(names))
    return f'<p class="legend">Difference of the two log-probabilities: {marks}</p>'


def _worst(report: Report) -> str:
    shown = {(s.sequence, i) for s in report.shown.token_texts.sequences for i in range(len(s.tokens))}
    head = "".join(f'<th scope="col">{h}</th>' for h in WORST)
    rows = []
    for w, cells in zip(report.shown.worst, worst_rows(report), strict=True):
        parts = [*map(_cell, cells)]
        parts[2] = f'<td class="text">{_text(cells[2])}</td>'
        if (w.sequence, w.position) in shown:
            link = f'<a href="#{_token_id(w.sequence, w.position)}">{_text(cells[3])}</a>'
            parts[3] = f"<td><bdi>{link}</bdi></td>"
        rows.append("".join(parts))
    return "<h3>Farthest apart</h3>" + _table_of(head, rows)


def _token_id(sequence: int, position: int) -> str:
    return f"s{sequence}t{position}"


def _sequence(texts: SequenceTexts, linked: set[tuple[int, int]], opened: bool) -> str:
    """One sequence: its prompt, its tokens in colours, and their figures in a table for who cannot hover."""
    sequence, tokens = texts.sequence, texts.tokens
    unequal = sum(level(s, t) > 0 for _, _, s, t in tokens)
    spans = "".join(_token(sequence, i, token, linked) for i, token in enumerate(tokens))
    rest = f" <em>{texts.left_out:,} further tokens</em>" if texts.left_out else ""
    headings = ("position", "token", "id", "sampler", "trainer", "trainer - sampler")
    figures = _table(
        headings,
        (
            (str(i), _shown(text, token), str(token), logprob(s), logprob(t), _difference(s, t))
            for i, (text, token, s, t) in enumerate(tokens)
        ),
    )
    return (
        f"<details{' open' * opened}><summary>Sequence {sequence}: {unequal} of {len(tokens)} tokens "
        "differ</summary>"
        f'<p class="texts" dir="ltr"><span class="prompt">{_text(texts.prompt)}</span>{spans}{rest}</p>'
        f"<details><summary>Figures of these tokens</summary>{figures}</details></details>"
    )


def _token(sequence: int, position: int, token: Sequence[Any], linked: set[tuple[int, int]]) -> str:
    text, token_id, s, t = token
    place = ""
    if (sequence, position) in linked:
        place = f' id="{_token_id(sequence, position)}" tabindex="-1"'
    title = f"position {position}: sampler {logprob(s)}, trainer {logprob(t)}"
    if s is None and t is None:
        title = f"position {position}: not compared"
    return f'<span class="t d{level(s, t)}"{place} title="{title}">{_text(_shown(text, token_id))}</span>'


def _shown(text: str, token: int) -> str:
    """The text of a token; its id where it has none (special tokens)."""
    return text or f"<{token}>"


def level(s: float | None, t: float | None) -> int:
    """The colour of a token with logprobs s and t: 0 equal, 1 to 6 by size, 7 impossible for one side."""
    a, b = (-math.inf if x is None else x for x in (s, t))
    if a == b:
        return 0
    if math.isinf(a) or math.isinf(b):
        return 2 + len(STEPS)
    return 1 + sum(abs(a - b) >= step for step in STEPS)


def _difference(s: float | None, t: float | None) -> str:
    a, b = (-math.inf if x is None else x for x in (s, t))
    return "0" if a == b else f"{b - a:.3g}"


# --- operations ---


def _operations(report: Report, trace: TraceSection) -> str:
    body = f"<p>{_text(parting(report) or 'Every operation that both engines have is equal to the bit.')}</p>"
    if text := jump(report):
        body += f"<p>{_text(text)}</p>"
    if report.figures.equal:
        body += _figure(operations_plot(trace))
    for side, ops in trace.one_sided.items():
        if ops:
            listed = ", ".join(ops[:8]) + (f" and {len(ops) - 8} more" if len(ops) > 8 else "")
            body += f"<p>Only {_text(getattr(report, side))} ({side}) has {_text(listed)}.</p>"
    if trace.other_shapes:
        body += f"<p>Of another shape: {_text(', '.join(trace.other_shapes[:8]))}.</p>"
    headings = (*OPERATIONS, *(f"own error, {name}" for name in trace.own_errors or {}))
    body += (
        "<p>An own error is that of an operation from its own inputs, relative to the size of its outputs; "
        "in "
        "brackets, how many times what rounding gives.</p>"
        "<details><summary>All operations, in the order of computation</summary>"
        f"{_table(headings, operation_rows(report))}</details>"
    )
    return body
