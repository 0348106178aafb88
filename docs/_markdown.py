"""Markdown of the parts that are made from the code."""

import re

from ._definitions import ROOT

# A part of a page that _generate.py writes: its first mark, and the name or the path in it.
PART = re.compile(r"^(<!-- generated: (?:file )?(\S+) -->\n).*?^<!-- end -->$", re.M | re.S)


def prose(text: str) -> str:
    """A description as Markdown: one paragraph. Names of files are code; nothing else is markup by chance."""
    parts = re.split(r"(`[^`]*`|(?<![\w/])(?:[a-z_]+/)+[a-z_0-9-]+\.(?:py|toml|md))", " ".join(text.split()))
    return "".join(
        _code(part) if i % 2 else re.sub(r"([_*<|\[])", r"\\\1", part) for i, part in enumerate(parts)
    )


def _code(part: str) -> str:
    """`engine/runs/ablations/ablate.py`, or a link where it is a page of this site."""
    page = part.removeprefix("docs/")
    if page != part and (ROOT / part).exists():
        return f"[{page.removesuffix('.md')}]({page})"
    return part if part.startswith("`") else f"`{part}`"
