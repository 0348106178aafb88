"""Markdown of reports and pages: text that stays text, and tables."""

from collections.abc import Iterable, Sequence


def escaped(text: str) -> str:
    """The text as Markdown that shows it and does nothing else, in a table too."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;")):
        text = text.replace(character, entity)
    return text


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without the end of its last line. Cells are Markdown already."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *rows))
