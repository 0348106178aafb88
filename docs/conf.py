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

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.linkcode"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_static", "Thumbs.db"]
nitpicky = True
smartquotes = False
# Types in signatures that stand on no page of this site.
nitpick_ignore_regex = [("py:.*", r"(?!zerokl\.).*")]

# Docstrings have Markdown's `code`.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
add_module_names = False
linkcode_resolve = _sources.linkcode_resolve

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
