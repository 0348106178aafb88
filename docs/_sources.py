"""Links of pages to the source, which fail the build when the code moves, and the pages that they lead to.

[`engine/train/step.py`](../engine/train/step.py)                a file or folder of the repository
[`engine/train/step.py::train_step`](../engine/train/step.py)    and it must define that name

A git host shows the file. In the site the link leads to _source/PATH.html, a page with the file and its line
numbers, and to the line that defines the name; that of a folder lists its files. Only what a page names has a
page. So the site needs no other server. Links to pages of the site stay, and a notebook is downloaded.

And the check of metrics.md: every metric whose name stands in the engine's code has its row there.
"""

import ast
import posixpath
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound
from sphinx.addnodes import download_reference, pending_xref
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

from ._definitions import ROOT, line_of

_LOG = logging.getLogger(__name__)
# The folder of the pages of source in the site.
_PAGES = "_source"
_METRIC = re.compile(
    r'"((?:reward|response_len|groups|completions|turns|ends|scaling|time|perf|eval|staleness|ref|mismatch'
    r'|dpo|verifree|brpo|critic|router|pool|gradient|update|lora)/[a-z0-9_]*)"'
)
# Metrics without a group.
_PLAIN = ("step", "tokens", "loss", "entropy", "grad_norm", "lr")


def setup(app):
    """Read every page in each build, as the code may have changed; link to the source; check the metrics."""
    app.add_transform(SourceLinks)
    app.connect("env-get-outdated", lambda app, env, added, changed, removed: sorted(env.found_docs))
    app.connect("env-check-consistency", check_metrics)
    app.connect("html-collect-pages", source_pages)


class SourceLinks(SphinxTransform):
    """Lets links to files and folders of the repository lead to their pages in the site."""

    default_priority = 1  # before Sphinx copies what it takes for a download

    def apply(self, **options) -> None:
        """A warning, and so an error, for a name that the file does not define."""
        for link in [*self.document.findall(pending_xref), *self.document.findall(download_reference)]:
            path = self._path(link)
            if path is None or path.suffix == ".ipynb" or self.env.path2doc(path) in self.env.found_docs:
                continue
            member = link.astext().partition("::")[2]
            try:
                page, _, line = source_target(path.relative_to(ROOT).as_posix(), member).partition("#")
            except ValueError as error:
                _LOG.warning("%s", error, location=link)
                continue
            uri = self.app.builder.get_relative_uri(self.env.docname, page) + (f"#{line}" if line else "")
            link.replace_self(nodes.reference("", "", *_breakable(link), internal=True, refuri=uri))

    def _path(self, link: nodes.Element) -> Path | None:
        """The file or folder of the repository that MyST read a link to, or None."""
        target = link["reftarget"].partition("#")[0]
        if link.get("reftype") != "myst" or not target:
            return None
        folder = Path(self.env.srcdir)
        if link.get("refdomain") == "doc":  # a page's name, whole where it stands outside the site
            target += ".md"
        else:
            folder /= posixpath.dirname(self.env.docname)
        path = Path(posixpath.normpath(folder / target))
        return path if path.exists() and path.is_relative_to(ROOT) else None


def _breakable(link: nodes.Element) -> list[nodes.Node]:
    """What a link shows. A path may be broken after each `/`, `:` and `_`."""
    code = next(iter(link.findall(nodes.literal)), None)
    if code is None:
        return link.children
    shown = nodes.literal("", "", classes=["src"])
    for part in re.split(r"(?<=[/:_])(?=[^:])", code.astext()):
        shown += [nodes.Text(part), nodes.raw("", "<wbr>", format="html")]
    return [shown]


# The pages of source


def source_target(path: str, member: str = "") -> str:
    """The page of a file or folder, and the line of what it defines. Raises ValueError where it does not."""
    if (ROOT / path).is_dir() and not member:
        return f"{_PAGES}/{path}/index"
    line = line_of(path, member) if member else None
    if member and line is None:
        raise ValueError(f"{path} does not define {member}")
    return f"{_PAGES}/{path}" + (f"#L-{line}" if line else "")


def source_pages(app) -> Iterator[tuple[str, dict, str]]:
    """For Sphinx: (name, context, template) of the page of each file and folder that a link leads to."""
    linked = set()
    for docname in app.env.found_docs:
        doctree = app.env.get_doctree(docname)
        for link in doctree.findall(nodes.reference):
            uri = posixpath.join(posixpath.dirname(docname), link.get("refuri", "").partition("#")[0])
            linked.add(posixpath.normpath(uri).removesuffix(".html"))
    paths = {
        page.removeprefix(f"{_PAGES}/").removesuffix("/index") for page in linked if page.startswith(_PAGES)
    }
    files = {file for path in paths for file in _files(ROOT / path)}
    folders = {ROOT / path for path in paths if (ROOT / path).is_dir()}
    folders |= {
        folder for file in files for folder in file.parents if any(f in folders for f in folder.parents)
    }
    for folder in sorted(folders):
        yield _page(app, folder, files, folders, _listing(app, folder, files, folders))
    for file in sorted(files):
        yield _page(app, file, files, folders, _highlighted(file))


def _files(path: Path) -> list[Path]:
    """The text files of a folder and of the folders in it, or the file itself."""
    if path.is_file():
        return [path]
    return [
        file
        for file in path.rglob("*")
        if file.is_file()
        and not any(part.startswith((".", "__pycache__")) for part in file.relative_to(ROOT).parts)
        and b"\0" not in file.read_bytes()
    ]


def _name(path: Path) -> str:
    """The name of the page of a file or folder."""
    return f"{_PAGES}/{path.relative_to(ROOT).as_posix()}" + ("/index" if path.is_dir() else "")


def _link(app, origin: Path, path: Path) -> str:
    uri = app.builder.get_relative_uri(_name(origin), _name(path))
    return f'<a href="{uri}"><code>{escape(path.name)}</code></a>'


def _page(app, path: Path, files: set[Path], folders: set[Path], body: str) -> tuple[str, dict, str]:
    """The page of a file or folder: its path, each folder of which is a link where it has a page."""
    parts = [
        _link(app, path, part) if part in folders else f"<code>{escape(part.name)}</code>"
        for part in reversed([part for part in path.parents if part.is_relative_to(ROOT) and part != ROOT])
    ]
    title = path.relative_to(ROOT).as_posix()
    above = f"<p>In {' / '.join(parts)}</p>" if parts else ""
    return (
        _name(path),
        {"title": title, "body": f"<h1>{escape(title).replace('/', '/<wbr>')}</h1>{above}{body}"},
        "page.html",
    )


def _listing(app, folder: Path, files: set[Path], folders: set[Path]) -> str:
    """The files and folders of a folder, each with the first sentence of its docstring."""
    inside = [path for path in sorted(folder.iterdir()) if path in files | folders]
    rows = [f"<dt>{_link(app, folder, path)}</dt><dd>{escape(_said(path))}</dd>" for path in inside]
    return f"<dl>{''.join(rows)}</dl>"


def _said(path: Path) -> str:
    """The first sentence of the docstring of a Python file, or of a folder's __init__.py."""
    file = path / "__init__.py" if path.is_dir() else path
    if file.suffix != ".py" or not file.exists():
        return ""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return re.split(r"(?<=\.) ", " ".join(text.split()))[0]


def _highlighted(file: Path) -> str:
    """The text of a file with a line number before each line; line 12 has the id L-12."""
    try:
        lexer = get_lexer_for_filename(file.name, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    formatter = HtmlFormatter(
        linenos="inline", linespans="L", anchorlinenos=True, cssclass="highlight source"
    )
    return highlight(file.read_text(), lexer, formatter)


# The check of metrics.md


def metric_names() -> set[str]:
    """Every metric that a run may write, from the code."""
    import numpy as np
    from zerokl.verify.mismatch import mismatch_metrics

    names = set(_PLAIN)
    for file in sorted((ROOT / "engine").rglob("*.py")):
        # trackers.py has the names of other frameworks.
        if not {"ablations", "checks", "report"} & {*file.parts} and file.name != "trackers.py":
            names |= {name for name in _METRIC.findall(file.read_text()) if not name.endswith("/")}
    # A metric for each of a run's budgets, of N tokens.
    names |= {"brpo/reward_at_N", "eval/reward_at_N"}
    # A metric for each loss that the gradient is compared under.
    names |= {f"gradient/{figure}_LOSS" for figure in ("cosine", "distance", "inner", "norm")}
    names |= {f"gradient/{figure}_floor" for figure in ("cosine", "distance")}
    names |= {f"gradient/{figure}_exact" for figure in ("inner", "norm")}
    watched = re.search(r"^WATCHED = \((.*)\)$", (ROOT / "engine/train/underflow.py").read_text(), re.M)[1]
    names |= {f"scaling/underflow_{name}" for name in re.findall(r'"(\w+)"', watched)}
    one = np.zeros(1, np.float32)
    return names.union(
        *(mismatch_metrics(one, one, [1], prefix) for prefix in ("mismatch/", "staleness/", "ref/"))
    )


def summary_keys() -> set[str]:
    """What summary.json holds."""
    from dataclasses import fields

    from zerokl.engine.runs.run import Summary

    return {field.name for field in fields(Summary)}


def check_metrics(app, env):
    """Warn for a metric or a key of summary.json without its row in metrics.md, and for a row too many."""
    metrics, _, summary = (Path(app.srcdir) / "metrics.md").read_text().partition("## summary.json")
    for text, names in ((metrics, metric_names()), (summary, summary_keys())):
        rows = {
            name
            for first in re.findall(r"^\| (`[^|]*`) \|", text, re.M)
            for name in re.findall(r"`([^`]+)`", first)
        }
        for name in sorted(names - rows):
            _LOG.warning("metrics.md: %s has no row", name, location="metrics")
        for name in sorted(rows - names):
            _LOG.warning("metrics.md: nothing writes %s", name, location="metrics")
