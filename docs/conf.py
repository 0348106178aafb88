"""The documentation site: sphinx-build -W --keep-going -n -b html docs build/docs."""

import re
from importlib import metadata
from pathlib import Path

import zerokl

ROOT = Path(__file__).resolve().parents[1]
if Path(zerokl.__file__).resolve().parent != ROOT:
    raise ImportError(f"docs: zerokl is imported from {zerokl.__file__}; pip install -e {ROOT}")

from zerokl.docs import _sources  # noqa: E402 - a wheel has no docs

project = "zerokl"
author = "the zerokl authors"
copyright = "the zerokl authors, Apache-2.0"
release = version = metadata.version("zerokl")

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_static", "Thumbs.db"]
nitpicky = True
smartquotes = False

# Pages are Markdown as a git host reads it, with its anchors: no extension of MyST's.
myst_heading_anchors = 3

html_theme = "furo"
html_title = "zerokl"
html_static_path = ["_static"]
html_css_files = ["zerokl.css"]
html_show_sourcelink = False
html_copy_source = False
pygments_style = "friendly"


# The order of pages in the sidebar, which only the site has: <!-- toctree: CAPTION, a page a line, then -->.
_TOCTREE = re.compile(r"^<!-- toctree:(?: (.*))?\n((?:.+\n)+)-->$", re.M)


def read_toctrees(app, page, source):
    """For Sphinx: a page's toctrees as the directives that they stand for."""

    def directive(toctree: re.Match) -> str:
        caption = f":caption: {toctree[1]}\n" if toctree[1] else ""
        return f"```{{toctree}}\n:hidden:\n{caption}\n{toctree[2]}```"

    source[0] = _TOCTREE.sub(directive, source[0])


def setup(app):
    """Sphinx calls it."""
    _sources.setup(app)
    app.connect("source-read", read_toctrees)
