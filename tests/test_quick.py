"""`--quick` keeps a diagonal of each matrix and drops what is marked full."""

import os
import subprocess
import sys
from pathlib import Path

MATRICES = """
import pytest

@pytest.fixture(params=["x", "y", "z"])
def fixed(request):
    return request.param

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [True, False])
def test_matrix(a, b): ...

@pytest.mark.parametrize("a", [1, 2])
def test_fixture(fixed, a): ...

@pytest.mark.parametrize(("a", "b"), [(1, True), (2, True), (2, False), (1, False)])
def test_rows(a, b): ...

@pytest.mark.full
def test_long(): ...
"""


def test_quick_keeps_as_few_cases_as_hold_every_value(tmp_path):
    (tmp_path / "test_matrices.py").write_text(MATRICES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    words = [
        "-m",
        "pytest",
        "-p",
        "conftest",
        "--quick",
        "--collect-only",
        "-q",
        "--rootdir",
        tmp_path,
        tmp_path,
    ]
    process = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    kept = [line.split("::")[1] for line in process.stdout.splitlines() if "::" in line]
    assert [name for name in kept if "matrix" in name] == [
        "test_matrix[True-1]",
        "test_matrix[False-2]",
        "test_matrix[False-3]",
    ], process.stdout + process.stderr
    assert [name for name in kept if "fixture" in name] == [
        "test_fixture[x-1]",
        "test_fixture[y-2]",
        "test_fixture[z-2]",
    ]
    assert len([name for name in kept if "rows" in name]) == 4
    assert not any("long" in name for name in kept)
