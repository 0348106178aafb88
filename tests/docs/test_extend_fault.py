"""docs/extend.md: the file of its fault, put into a copy of the source, is all that a new fault needs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zerokl

ROOT = Path(zerokl.__file__).parent
EXAMPLE = ROOT / "docs" / "examples" / "reversed_numbers.py"


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of the package, of the generated test and of the pages that its models learn."""
    copy = tmp_path / "zerokl"
    folders = (
        "audit",
        "benchmarks/audit_cases",
        "cli",
        "engine",
        "files",
        "integrations",
        "kernels",
        "model",
    )
    for folder in (*folders, "verify", "docs", "tests/audit/faults"):
        skipped = shutil.ignore_patterns("__pycache__", "*.png", "*.ipynb")
        shutil.copytree(ROOT / folder, copy / folder, ignore=skipped)
    for file in (*ROOT.glob("*.py"), ROOT / "pyproject.toml", ROOT / "README.md"):
        shutil.copyfile(file, copy / file.name)
    return copy


def run(source: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(source.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_the_file_alone_makes_an_audit_name_the_fault(source):
    rng, rows = np.random.default_rng(0), []
    for i in range(12):
        numbers = (-rng.gamma(1.0, 1.0, int(rng.integers(20, 40)))).tolist()
        ids = {"prompt_ids": [5, i], "completion_ids": rng.integers(9, 90, len(numbers)).tolist()}
        rows.append(ids | {"logprobs": numbers[::-1], "trainer_logprobs": numbers, "temperature": 1.0})
    log = source.parent / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def cause(out: str) -> str:
        done = run(source, "-m", "zerokl", "audit", str(log), "--out", str(source.parent / out))
        assert done.returncode == 1, done.stdout + done.stderr
        return json.loads((source.parent / out / "audit.json").read_text())["cause"]["kind"]

    assert cause("without") != "reversed numbers", "control"
    shutil.copy(EXAMPLE, source / "audit" / "faults" / "numbers")
    assert cause("with") == "reversed numbers"


def _train_less(conftest: Path) -> None:
    """What is planted in columns shows with any model."""
    text = conftest.read_text()
    assert text.count("STEPS = 80") == 1
    conftest.write_text(text.replace("STEPS = 80", "STEPS = 9"))


@pytest.mark.full
def test_its_plant_is_tested_without_a_line_of_test(source):
    shutil.copy(EXAMPLE, source / "audit" / "faults" / "numbers")
    _train_less(source / "tests/audit/faults/conftest.py")
    words = ("-q", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "flipped_to_pad or each_fault")
    done = run(source, "-m", "pytest", *words, "tests/audit/faults")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
