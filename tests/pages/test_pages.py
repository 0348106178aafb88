"""Pieces of pages: text stays text wherever it stands, and a chart holds what can be drawn."""

import json
import math
from html.parser import HTMLParser

from zerokl.pages import markdown
from zerokl.pages.charts import Chart, Series, chart
from zerokl.pages.html import card, figure_card, folded, table
from zerokl.pages.page import document

from tests.made_run import HOSTILE


class Elements(HTMLParser):
    """The elements of a page, and what each attribute holds."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, list[str]] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")


def given(drawn: Chart) -> dict:
    """What the script is given to draw."""
    (data,) = Elements(chart(drawn)).attributes["data-chart"]
    return json.loads(data)


def test_hostile_text_is_text_in_every_piece():
    drawn = chart(
        Chart(HOSTILE, [0], [Series(HOSTILE, [1.0])], [(0, HOSTILE)], names=[HOSTILE], flags=[(0, HOSTILE)])
    )
    body = card(HOSTILE, table([HOSTILE], [[HOSTILE]])) + figure_card(*[HOSTILE] * 3)
    page = document(HOSTILE, HOSTILE, {"a": HOSTILE}, body + folded("a", HOSTILE, drawn))
    elements = Elements(page)
    assert {"img", "svg", "iframe"} & elements.tags == set()
    assert not [name for name in elements.attributes if name.startswith("on")]
    assert page.count("<script>") == 1
    assert {"\u202e", "\x00", "\x1b"}.isdisjoint(page)
    (data,) = elements.attributes["data-chart"]
    assert {"\u202e", "\x00", "\x1b"}.isdisjoint(json.dumps(json.loads(data), ensure_ascii=False))
    assert HOSTILE[:20] in json.loads(data)["flags"][0][1], "control: it is there, as text"


def test_what_has_no_place_on_a_logarithmic_axis_is_left_out():
    values = [None, 0.0, -1.0, math.nan, math.inf, 1.23456e-7, 3]
    drawn = given(Chart("x", range(len(values)), [Series("y", values, "bars")], []))
    assert drawn["series"] == [{"name": "y", "kind": "bars", "y": [None] * 5 + [1.235e-7, 3.0]}]
    assert drawn["x"] == [*range(len(values))]


def test_a_cell_of_a_table_in_markdown_ends_neither_cell_nor_row():
    lines = markdown.table(("a", "b"), [map(markdown.escaped, ("x|y", "<b>`&")), ("1", "2")]).splitlines()
    assert lines == ["| a | b |", "| --- | --- |", "| x&#124;y | &lt;b&gt;&#96;&amp; |", "| 1 | 2 |"]
