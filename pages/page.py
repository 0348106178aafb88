"""The template of every page: one HTML file with its style, its scripts, a library for charts, and its data.

The file asks the network for nothing. Its content security policy forbids that, and every script and style
but these. All that comes from runs, models and logs is text, so it brings no markup and no code along.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..files.inputs import read_text
from .html import inert

STATIC = Path(__file__).parent / "static"
_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "dom.js", "charts.js")


def document(
    title: str,
    kind: str,
    sections: Mapping[str, str],
    body: str,
    *,
    scripts: Sequence[Path] = (),
    data: str = "",
    connect: str = "'none'",
) -> str:
    """A page.

    title, kind: text; the kind stands beside the name of zerokl. sections: id and name of each part that the
    bar leads to; the first one is the content. body, data: HTML. scripts: those of this page, after the
    template's. connect: the policy's address of a server.
    """
    style = "\n".join(map(read_text, (STATIC / name for name in _STYLES)))
    script = "\n".join(map(read_text, (*(STATIC / name for name in _SCRIPTS), *scripts)))
    return _TEMPLATE.format(
        policy=(
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
            f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
        ),
        title=inert(title),
        kind=inert(kind),
        mark=generator(kind),
        style=style,
        first=next(iter(sections)),
        links="".join(f'<li><a href="#{name}">{inert(words)}</a></li>' for name, words in sections.items()),
        body=body,
        data=data,
        script=script,
    )


def generator(kind: str) -> str:
    """The line of every page of a kind, by which a file is told from one that zerokl has not made."""
    return f'<meta name="generator" content="zerokl {inert(kind)}">'


def _hash(content: str) -> str:
    """The hash by which the policy allows a style or a script of the page, and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode('utf-8')).digest()).decode()}"


_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
{mark}
<link rel="icon" href="data:,">
<title>{title} · zerokl {kind}</title>
<style>{style}</style>
</head>
<body>
<header class="bar"><a class="skip" href="#{first}">Skip to the content</a>
<span class="brand">zerokl <b>{kind}</b></span>
<nav aria-label="parts of this page"><ul>{links}</ul></nav></header>
<main>{body}
<noscript>This page needs JavaScript to draw its charts. It loads nothing from the network.</noscript>
</main>
{data}
<script>{script}</script>
</body>
</html>
"""
