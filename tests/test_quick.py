"""`--quick` drops what is marked full, and takes few cases of the rest; `--rest` is what it leaves out."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MATRICES = """
import pytest
from hypothesis import given, strategies as st

@pytest.fixture(params=["x", "y", "z"])
def fixed(request):
    return request.param

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [True, False])
def test_matrix(a, b): ...

@pytest.mark.parametrize("a", range(7))
@pytest.mark.parametrize("b", [True, False])
def test_wide(a, b): ...

@pytest.mark.parametrize("a", [1, 2])
def test_fixture(fixed, a): ...

@pytest.mark.parametrize(("a", "b"), [(1, True), (2, True), (2, False), (1, False)])
def test_rows(a, b): ...

@pytest.mark.full
def test_long(): ...

@pytest.mark.parametrize("x", ["short", pytest.param("long", marks=pytest.mark.full)])
def test_partly(x): ...

@given(st.integers())
def test_property(x): ...
"""


EXAMPLES = """
import pytest
from hypothesis import given, strategies as st
from helpers import property_settings

ran = []

@property_settings(50)
@given(st.integers())
def test_property(x):
    ran.append(x)

def test_number():
    print(f"ran {len(ran)} {sorted(ran)}")
"""


def _collected(folder: Path, option: str) -> list[str]:
    """The tests of MATRICES that pytest collects with this option."""
    out = _pytest(folder, MATRICES, option, "--collect-only")
    return [line.split("::")[1] for line in out.splitlines() if "::" in line]


def _pytest(folder: Path, tests: str, *options: str) -> str:
    """What pytest prints for a file of tests."""
    (folder / "test_file.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    words = ["-p", "conftest", "-q", *options, "--rootdir", folder, folder]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return process.stdout


def _examples(printed: str) -> list[int]:
    """What the property of EXAMPLES was tried with."""
    return json.loads(re.search(r"ran \d+ (\[.*\])", printed)[1])


def test_quick_keeps_as_few_cases_as_hold_every_value(tmp_path):
    kept = _collected(tmp_path, "--quick")
    assert [name for name in kept if "matrix" in name] == [
        "test_matrix[True-1]",
        "test_matrix[False-2]",
        "test_matrix[False-3]",
    ]
    wide = ["test_wide[True-0]", "test_wide[False-1]", "test_wide[False-6]"]
    assert [name for name in kept if "wide" in name] == wide, "the first two of the diagonal and its last"
    assert [name for name in kept if "fixture" in name] == [
        "test_fixture[x-1]",
        "test_fixture[y-2]",
        "test_fixture[z-2]",
    ]
    listed = ["test_rows[1-True]", "test_rows[1-False]"]
    assert [name for name in kept if "rows" in name] == listed, "the first and the last"
    assert not any("long" in name for name in kept)
    assert "test_partly[short]" in kept
    left = {"test_rows[2-True]", "test_rows[2-False]", *(f"test_wide[False-{a}]" for a in (2, 3, 4, 5))}
    assert set(_collected(tmp_path, "--diagonal")) == {*kept, *left}, (
        "every row of a list and of the diagonal"
    )


@pytest.mark.full
def test_quick_takes_a_fifth_of_the_examples(tmp_path):
    printed = _pytest(tmp_path, EXAMPLES, "--quick", "-s")
    assert "ran 10 " in printed
    assert "ran 50 " in _pytest(tmp_path, EXAMPLES, "--color=no", "-s")
    assert _examples(printed) == _examples(_pytest(tmp_path, EXAMPLES, "--quick", "-s")), "control"


@pytest.mark.full
def test_rest_takes_other_examples_of_the_same_number(tmp_path):
    printed = _pytest(tmp_path, EXAMPLES, "--quick", "-s")
    again = _pytest(
        tmp_path, EXAMPLES.replace("def test_number", "@pytest.mark.full\ndef test_number"), "--rest", "-s"
    )
    assert len(_examples(printed)) == len(_examples(again)) == 10
    assert len(set(_examples(printed)) & set(_examples(again))) < 5


@pytest.mark.full
def test_rest_is_what_quick_leaves_out_and_every_property(tmp_path):
    everything, quick, rest = (_collected(tmp_path, option) for option in ("--color=no", "--quick", "--rest"))
    assert len(everything) == 3 * 2 + 7 * 2 + 3 * 2 + 4 + 2 + 2
    assert set(quick) | set(rest) == set(everything)
    assert set(quick) & set(rest) == {"test_property"}
