"""Pieces of a page: text that stays text, tables, cards, and sections that open on demand.

Text of a model or of a log is hostile: it may hold control characters, escape sequences of terminals, markup,
and characters that turn the direction of writing.
"""

import html
from collections.abc import Iterable, Sequence

from ..files.reading import printable


def visible(text: str) -> str:
    """The text with every character that does not print (control, direction, surrogate) as an escape."""
    return printable(text, keep="")


def inert(x: object) -> str:
    """Anything as inert text of a page: nothing unprintable, no markup."""
    return html.escape(visible(str(x)))


def card(heading: str, body: str) -> str:
    """A card of the page. The heading is text, the body is HTML."""
    return f'<div class="card"><h2>{inert(heading)}</h2>{body}</div>'


def figure_card(name: str, value: str, note: str) -> str:
    """A card with one figure: its name, its value, and what it is."""
    parts = ((name, "name"), (value, "value"), (note, "note"))
    return f'<div class="card figure">{"".join(f"<p class={c}>{inert(x)}</p>" for x, c in parts)}</div>'


def folded(name: str, heading: str, body: str) -> str:
    """A section that opens on demand, and by a link to what is in it."""
    inside = f'<div id="{name}" class="inside" tabindex="-1">{body}</div>'
    summary = f"<summary><h2>{inert(heading)}</h2></summary>"
    return f'<section class="card"><details>{summary}{inside}</details></section>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts."""
    return table_of_cells(headings, ("".join(map(cell, row)) for row in rows))


def cell(x: str) -> str:
    """A cell; short figures do not break."""
    short = ' class="n"' if x[:1] in "-0123456789" and len(x) < 24 else ""
    return f"<td{short}>{inert(x)}</td>"


def table_of_cells(headings: Sequence[str], rows: Iterable[str]) -> str:
    """A table of rows of cells that are HTML already. A wide one scrolls by itself, by keyboard too."""
    head = "".join(f'<th scope="col">{inert(heading)}</th>' for heading in headings)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll" tabindex="0"><table class="words">{inner}</table></div>'
