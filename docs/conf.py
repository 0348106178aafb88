"""The documentation site: sphinx-build -W --keep-going -n -b html docs build/docs."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import _generate
import _sources
import zerokl

if Path(zerokl.__file__).resolve().parent != _sources.ROOT:
    raise ImportError(f"docs: zerokl is imported from {zerokl.__file__}; pip install -e {_sources.ROOT}")

project = "zerokl"
author = "the zerokl authors"
copyright = "the zerokl authors, Apache-2.0"
release = version = metadata.version("zerokl")

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_static", "Thumbs.db"]
nitpicky = True

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "zerokl"
html_static_path = ["_static"]
html_css_files = ["zerokl.css"]
html_show_sourcelink = False
html_copy_source = False
pygments_style = "friendly"


def setup(app):
    """Sphinx calls it."""
    _sources.setup(app)
    _generate.setup(app)
