"""The names of the source that the pages link to: each is defined on the line that its link leads to."""

import re
from pathlib import Path

import pytest
from zerokl.docs._definitions import ROOT, definitions, line_of

NAMED = sorted(
    {
        (path, name, (page.parent / target).resolve().relative_to(ROOT).as_posix())
        for page in (ROOT / "docs").rglob("*.md")
        for path, name, target in re.findall(r"\[`([^`]+)::([^`]+)`\]\(([^)]+)\)", page.read_text())
    }
)


def test_the_pages_name_the_source():
    assert len(NAMED) > 100


@pytest.mark.parametrize(("path", "name", "target"), NAMED, ids=str)
def test_a_link_leads_to_the_line_that_defines_the_name(path, name, target):
    assert path == target
    line = (ROOT / path).read_text().splitlines()[line_of(path, name) - 1]
    word = re.escape(name.rpartition(".")[2])
    assert re.search(rf"^\s*(?:(?:async )?def |class ){word}\b|^\s*(?:\w+, )*{word}\b.*=", line), line


def test_a_name_that_is_only_used_has_no_line():
    assert line_of("engine/train/step.py", "train_step")
    assert line_of("engine/train/step.py", "replace") is None  # imported
    assert line_of("engine/train/step.py", "trian_step") is None
    assert line_of("benchmarks/LOG.md", "train_step") is None


def test_the_outermost_definition_counts_then_the_first(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        "class A:\n    def f(self): ...\n\n@cache\ndef f(): ...\n\nf = 1\na, (b, *c) = 1, (2, 3)\n"
    )
    assert definitions(str(Path(file))) == {"A": 1, "A.f": 2, "f": 5, "a": 8, "b": 8, "c": 8}
