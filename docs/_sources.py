"""Links to the code that fail the build when the code moves.

{src}`engine/train/step.py`                  the file or folder must exist
{src}`engine/train/step.py::train_step`      and it must define that name (or TEST::test_name)

And the check of metrics.md: every metric whose name stands in the engine's code has its row there.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[1]
_LOG = logging.getLogger(__name__)
_METRIC = re.compile(
    r'"((?:reward|response_len|groups|completions|scaling|time|perf|eval|staleness|ref|mismatch)/[a-z0-9_]*)"'
)
_DEFINES = r"^\s*(?:(?:def|class) {0}\b|{0}\b.*=)"
# Metrics without a group.
_PLAIN = ("step", "tokens", "loss", "entropy", "grad_norm", "lr")


def setup(app):
    """Make the role known; read every page in each build, as the code may have changed; check the metrics."""
    app.add_role("src", source_role)
    app.connect("env-get-outdated", lambda app, env, added, changed, removed: sorted(env.found_docs))
    app.connect("env-check-consistency", check_metrics)


def source_role(name, rawtext, text, lineno, inliner, options=None, content=None):
    """A path from the repository's root, as code. A warning, and so an error, where it does not exist."""
    path, _, member = text.partition("::")
    node, place = nodes.literal(rawtext, "", classes=["src"]), ROOT / path
    for part in re.split(r"(?<=[/:_])(?=[^:])", text):  # a browser may break the line after each
        node += [nodes.Text(part), nodes.raw("", "<wbr>", format="html")]
    where = (inliner.document.settings.env.docname, lineno)
    if not place.exists():
        _LOG.warning("src: %s does not exist", path, location=where)
    elif member and not re.search(_DEFINES.format(re.escape(member)), place.read_text(), re.M):
        _LOG.warning("src: %s does not define %s", path, member, location=where)
    return [node], []


def metric_names() -> set[str]:
    """Every metric that a run may write, from the code."""
    import numpy as np
    from zerokl.verify.mismatch import mismatch_metrics

    found = set(_PLAIN)
    for file in sorted((ROOT / "engine").rglob("*.py")):
        # trackers.py has the names of other frameworks.
        if "commands" not in file.parts and file.name != "trackers.py":
            found |= {name for name in _METRIC.findall(file.read_text()) if not name.endswith("/")}
    watched = re.search(r"^WATCHED = \((.*)\)$", (ROOT / "engine/train/underflow.py").read_text(), re.M)[1]
    found |= {f"scaling/underflow_{name}" for name in re.findall(r'"(\w+)"', watched)}
    one = np.zeros(1, np.float32)
    return found.union(
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
