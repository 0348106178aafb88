"""README and the pages of docs/ as a git host or an editor shows them: plain Markdown, nothing left out."""

import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from zerokl.docs._definitions import ROOT
from zerokl.docs._generate import filled, pages
from zerokl.docs._markdown import PART

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("wheels/*/*.md")), *pages()]
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
# What only Sphinx's Markdown knows: a role, a label, attributes, a block. `` stands for a piece of code.
_SPHINX_ONLY = re.compile(r"\{[a-z:]+\}``|^\([\w-]+\)=$|^\{[.#][^}]*\}$|^:{3}|^: ", re.M)


def relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def holes(text: str) -> list[str]:
    """What a renderer of CommonMark with tables shows as markup, or as nothing."""
    tokens = MARKDOWN.parse(text)
    shown = []
    for token, following in zip(tokens, [*tokens[1:], Token("end", "", 0)], strict=True):
        if token.type == "fence" and (token.info.startswith("{") or not token.content.strip()):
            shown.append(f"a block: {token.info}")
        elif token.type == "html_block" and token.content.startswith("<!-- generated") and not following.tag:
            shown.append(token.content)
        elif token.type == "inline":
            shown += _holes_in_text(token.children)
    return shown


def _holes_in_text(children: list[Token]) -> list[str]:
    kinds = {"code_inline": "``", "softbreak": "\n"}
    marks = _SPHINX_ONLY.findall("".join(kinds.get(child.type, child.content) for child in children))
    pairs = [(child.type, following.type) for child, following in pairwise(children)]
    return marks + ["a link without text"] * pairs.count(("link_open", "link_close"))


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_nothing_on_a_page_is_for_sphinx_alone(page):
    assert holes(page.read_text()) == []


@pytest.mark.parametrize(
    "hole",
    [
        "See {src}`engine/config/run_config.py` and more.",
        "| key |\n| --- |\n| {confval}`loss.preset` |",
        "```{literalinclude} x.toml\n```",
        "```{glossary}\nword\n  What it is.\n```",
        "```text\n```",
        "<!-- generated: gap -->\n\n<!-- end -->",
        "(what-has-run)=\n## What has run",
        "{.messages}\n| a |\n| --- |\n| b |",
        ":::{note}\nWords.\n:::",
        "[Install](install.md)\n: make, pip.",
        "See [](install.md).",
    ],
)
def test_control_a_hole_is_found(hole):
    assert len(holes(f"# Page\n\nWords.\n\n{hole}\n\nMore.\n")) >= 1
    assert holes("# Page\n\n`{prompt}` stands for it: {a} and (b) =\n\n```text\n{src}`x`\n```\n") == []


def test_the_parts_of_the_pages_are_what_is_written_anew():
    """Where this fails: `make docs-tables`."""
    assert [relative(page) for page in pages() if filled(page) != page.read_text()] == []
    assert sum(len(PART.findall(page.read_text())) for page in pages()) > 40


def test_control_an_old_figure_and_an_unknown_part_are_found(tmp_path):
    page = tmp_path / "page.md"
    text = (ROOT / "docs" / "vllm.md").read_text()
    page.write_text(text)
    assert filled(page) == text
    page.write_text(text.replace("`vllm-exact` |", "`vllm-stock` |", 1))
    assert page.read_text() != text == filled(page)
    page.write_text("<!-- generated: no-such -->\n<!-- end -->")
    with pytest.raises(KeyError):
        filled(page)


def inline(tokens: list[Token]) -> list[Token]:
    return [child for token in tokens if token.type == "inline" for child in token.children]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that a git host gives the headings of a page."""
    tokens = MARKDOWN.parse(page.read_text())
    seen: Counter[str] = Counter()
    names = set()
    for opening, heading in pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in heading.children)
            name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            names.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
    return names


@cache
def links(page: Path) -> list[tuple[Path, str]]:
    """The files and anchors that the links and pictures of a page lead to, others' pages left out."""
    tokens = inline(MARKDOWN.parse(page.read_text()))
    targets = [str(token.attrGet("href") or token.attrGet("src") or "") for token in tokens]
    local = [target.partition("#") for target in targets if target and not re.match("https?:", target)]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in local]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_leads_to_a_file_and_a_heading(page):
    broken = [
        f"{path.name}#{anchor}"
        for path, anchor in links(page)
        if not path.exists() or (anchor and anchor not in anchors(path))
    ]
    assert broken == []


def test_every_page_is_reached_from_the_readme():
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            left += [path for path, _ in links(page) if path.exists()]
    assert set(pages()) <= reached
