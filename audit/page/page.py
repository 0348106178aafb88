"""audit.html: one file whose first screen answers: sound or at fault, why, what to do, how far, and one plot.

All else is folded below: what was tried, figures, tokens, operations, settings. It is made of the report
alone. The template is that of all pages (pages/page.py).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...files.reading import first_few
from ...pages.charts import chart
from ...pages.html import card, cell, figure_card, folded, inert, table, table_of_cells
from ...pages.page import document
from ...verify.bias_figures import DrawnBias
from ..conclusion.outcome import Outcome
from ..conclusion.verdict import cause_heading, headline, jump, parting
from ..report import Report
from ..run_report import RunReport
from ..sections import TraceSection
from ..sentence import begun
from .charts import operations_chart, positions_chart, ratios_chart, steps_chart
from .gradient_tables import LEGEND, LOSSES, drawn_from, layer_headings, layer_rows, loss_rows
from .numbers import logprob
from .rows import (
    AGAINST,
    HYPOTHESES,
    OPERATIONS,
    PLUS_MINUS,
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
    step_figures,
    step_rows,
    worst_rows,
)
from .token_texts import SequenceTexts

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
    parts = {
        "tried": _hypotheses(report),
        "figures": _figures(report),
        "tokens": _tokens(report),
        "operations": _operations(report, report.trace) if report.trace else "",
        "gradient": _gradient(report.gradient) if report.gradient else "",
        "settings": _settings(report),
    }
    return _document(title, report.outcome, headline(report), _first_screen(report), parts)


def run_page(report: RunReport, sentences: Sequence[str]) -> str:
    """The page over the checkpoints of a run. sentences: what it says, the first one beside the outcome."""
    title = f"{report.run}: {report.sampler} against {report.trainer}"
    rows = report.steps
    body = "" if all(r.frac_equal == 1.0 for r in rows) else chart(steps_chart(rows))
    if report.bar:
        body += table(step_figures(report), step_rows(report))
    else:
        links = (f'<td><a href="step-{r.step:06d}/audit.html">step {r.step}</a></td>' for r in rows)
        cells = ("".join(map(cell, texts)) for texts in step_rows(report))
        linked = (row + link for row, link in zip(cells, links, strict=True))
        body += table_of_cells((*step_figures(report), "report"), linked)
    text = "".join(f"<p>{inert(sentence)}</p>" for sentence in sentences[1:] or sentences)
    cards = f"{card(_SECTIONS['cause'], text)}{card('By step', body)}"
    shown = f'<section id="cause" class="stack" tabindex="-1">{cards}</section>'
    return _document(title, report.outcome, sentences[0], shown, {"settings": _settings(report)})


def _settings(report: Report | RunReport) -> str:
    body = table(("assumed", "value"), setting_rows(report))
    if isinstance(report, Report) and report.against:
        body += f"<h3>Since {inert(report.against.audit)}</h3>" + table(AGAINST, against_rows(report))
    return body


def _document(title: str, outcome: Outcome, sentence: str, first: str, parts: Mapping[str, str]) -> str:
    """A page. title and sentence are text. first is HTML, and so is each part that is folded, by section."""
    parts = {name: body for name, body in parts.items() if body}
    sections = {name: _SECTIONS[name] for name in ("cause", *parts)}
    below = "".join(folded(name, _SECTIONS[name], body) for name, body in parts.items())
    return document(
        title, "audit", sections, f"<h1>{inert(title)}</h1>{_answer(outcome, sentence)}{first}{below}"
    )


def _answer(outcome: Outcome, sentence: str) -> str:
    """The outcome in its colour, and a sentence below."""
    sign = f'<span aria-hidden="true">{outcome.sign}</span>'
    words = f'<p class="answer">{sign} {inert(outcome.words)}</p>'
    return f'<div class="card verdict {outcome.css_class}">{words}<p>{inert(begun(sentence))}</p></div>'


def _first_screen(report: Report) -> str:
    """The cause and what to do, three figures and a chart, and the notes, folded."""
    text = begun(report.cause.text)
    sentences = [*filter(None, (parting(report), jump(report))), *report.notes, *report.log_notes]
    notes = "".join(f"<li>{inert(s)}</li>" for s in sentences)
    count = f"{len(sentences)} note{'s' * (len(sentences) != 1)}"
    body = (
        f'<p class="cause">{inert(text)}</p><p><strong>What to do:</strong> {inert(report.cause.remedy)}</p>'
    )
    if notes:
        body += f"<details><summary>{count} beside it</summary><ul>{notes}</ul></details>"
    cards = "".join(figure_card(*row) for row in key_rows(report))
    drawn = _main_chart(report)
    drawn = f'<div class="card">{drawn}</div>' if drawn else ""
    return (
        f'<section id="cause" class="screen" tabindex="-1">{card(cause_heading(report), body)}'
        f'<div class="keys">{cards}</div>{drawn}</section>'
    )


def _main_chart(report: Report) -> str:
    """Where two engines part, operation by operation; of a log, where in a completion; nothing if equal."""
    figures = report.shown.figures
    if figures.equal:
        return ""
    return chart(operations_chart(report.trace) if report.trace else positions_chart(figures.by_position))


def _hypotheses(report: Report) -> str:
    """What was tried on a log, the nearest first; empty where nothing was."""
    if not (rows := hypothesis_rows(report)):
        return ""
    return "<p>What would explain the difference, nearest first.</p>" + table(HYPOTHESES, rows)


def _figures(report: Report) -> str:
    headings = ("figure", "value", "meaning")
    body = table(headings, figure_rows(report)) + f"<p>{inert(PLUS_MINUS)}</p>"
    if rows := full_vocab_rows(report.full_vocab):
        body += "<h3>The whole vocabulary</h3>" + table(headings, rows)
    body += "<h3>Each engine against itself</h3>" + table(headings, own_rows(report))
    body += "<h3>By position in the completion, from 0</h3>"
    figures = report.shown.figures
    if not figures.equal and report.trace:
        body += chart(positions_chart(figures.by_position))
    body += table(headings, position_rows(report))
    if not figures.equal:
        body += "<h3>Ratios</h3>" + chart(ratios_chart(figures.ratio_histogram))
    return body


def _gradient(bias: DrawnBias) -> str:
    body = f"<p>{inert(drawn_from(bias))}</p>" + table(LOSSES, loss_rows(bias.losses))
    body += f"<p>{inert(LEGEND)}</p><h3>By layer</h3>"
    return body + table(layer_headings(bias), layer_rows(bias))


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
    return f'<p class="levels">Difference of the two log-probabilities: {marks}</p>'


def _worst(report: Report) -> str:
    shown = {(s.sequence, i) for s in report.shown.token_texts.sequences for i in range(len(s.tokens))}
    rows = []
    for w, cells in zip(report.shown.worst, worst_rows(report), strict=True):
        parts = [*map(cell, cells)]
        parts[2] = f'<td class="text">{inert(cells[2])}</td>'
        if (w.sequence, w.position) in shown:
            link = f'<a href="#{_token_id(w.sequence, w.position)}">{inert(cells[3])}</a>'
            parts[3] = f"<td><bdi>{link}</bdi></td>"
        rows.append("".join(parts))
    return "<h3>Farthest apart</h3>" + table_of_cells(WORST, rows)


def _token_id(sequence: int, position: int) -> str:
    return f"s{sequence}t{position}"


def _sequence(texts: SequenceTexts, linked: set[tuple[int, int]], opened: bool) -> str:
    """One sequence: its prompt, its tokens in colours, and their figures in a table for who cannot hover."""
    sequence, tokens = texts.sequence, texts.tokens
    unequal = sum(level(s, t) > 0 for _, _, s, t in tokens)
    spans = "".join(_token(sequence, i, token, linked) for i, token in enumerate(tokens))
    rest = f" <em>{texts.left_out:,} further tokens</em>" if texts.left_out else ""
    headings = ("position", "token", "id", "sampler", "trainer", "trainer - sampler")
    figures = table(
        headings,
        (
            (str(i), _shown(text, token), str(token), logprob(s), logprob(t), _difference(s, t))
            for i, (text, token, s, t) in enumerate(tokens)
        ),
    )
    return (
        f"<details{' open' * opened}><summary>Sequence {sequence}: {unequal} of {len(tokens)} tokens "
        "differ</summary>"
        f'<p class="texts" dir="ltr"><span class="prompt">{inert(texts.prompt)}</span>{spans}{rest}</p>'
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
    return f'<span class="t d{level(s, t)}"{place} title="{title}">{inert(_shown(text, token_id))}</span>'


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
    body = f"<p>{inert(parting(report) or 'Every operation that both engines have is equal to the bit.')}</p>"
    if text := jump(report):
        body += f"<p>{inert(text)}</p>"
    if report.figures.equal:
        body += chart(operations_chart(trace))
    for side, ops in trace.one_sided.items():
        if ops:
            body += f"<p>Only {inert(getattr(report, side))} ({side}) has {inert(first_few(ops, 8))}.</p>"
    if trace.other_shapes:
        body += f"<p>Of another shape: {inert(', '.join(trace.other_shapes[:8]))}.</p>"
    headings = (*OPERATIONS, *(f"own error, {name}" for name in trace.own_errors or {}))
    body += (
        "<p>An own error is that of an operation from its own inputs, relative to the size of its outputs; "
        "in "
        "brackets, how many times what rounding gives.</p>"
        "<details><summary>All operations, in the order of computation</summary>"
        f"{table(headings, operation_rows(report))}</details>"
    )
    return body
