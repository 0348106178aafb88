"""Charts of a page as plain values, on a logarithmic axis. uPlot draws them (static/charts.js).

uPlot is the one library of charts. It has what a run's page needs: it zooms, it tells the values under the
pointer, and it draws again when a run goes on, or a line is hidden or smoothed. Charts that are made as SVG
beforehand have none of this. The price is 75 kB in each audit's page, most of it scripts. Without scripts
that page lacks its charts and nothing else, and its policy allows no scripts but these.
"""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .html import inert, visible


@dataclass(frozen=True)
class Series:
    """Values of a chart, one for each place; what is None, 0 or not finite has none on the axis.

    kind: line; both, which is a line with its marks; marks; hollow, which are other marks; or bars.
    """

    name: str
    y: Sequence[float | None]
    kind: str = "line"


@dataclass(frozen=True)
class Chart:
    """Series over the places x.

    ticks: places with words below the axis. names: what a place is called for those who point at it; by
    default its number. flags: places with a vertical line, and words above it.
    """

    label: str
    x: Sequence[float]
    series: Sequence[Series]
    ticks: Sequence[tuple[float, str]]
    names: Sequence[str] = ()
    flags: Sequence[tuple[float, str]] = ()


def chart(x: Chart) -> str:
    """The chart as HTML: its key, the place where it is drawn, and what it is."""
    given = {
        "label": visible(x.label),
        "x": list(x.x),
        "series": [{"name": visible(s.name), "kind": s.kind, "y": [*map(_drawn, s.y)]} for s in x.series],
        "ticks": [(place, visible(words)) for place, words in x.ticks],
        "names": [*map(visible, x.names)],
        "flags": [(place, visible(words)) for place, words in x.flags],
    }
    key = "".join(
        f'<li><span class="swatch l{i}{" ring" * (s.kind == "hollow")}"></span>{inert(s.name)}</li>'
        for i, s in enumerate(x.series)
    )
    data = html.escape(json.dumps(given, separators=(",", ":"), ensure_ascii=False, allow_nan=False))
    return (
        f'<figure><div class="head"><ul class="key">{key}</ul><span class="reading"></span></div>'
        f'<div class="plot" role="img" aria-label="{inert(x.label)}" data-chart="{data}"></div>'
        f"<figcaption>{inert(x.label)}</figcaption></figure>"
    )


def _drawn(value: float | None) -> float | None:
    """A value with the digits that a chart shows; None where it has no place on the axis."""
    if value is None or not math.isfinite(value) or value <= 0:
        return None
    return float(f"{value:.4g}")
