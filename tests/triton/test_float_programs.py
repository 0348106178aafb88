"""The same arithmetic as vLLM's kernels, shown on what a GPU would run: the compiled float instructions, one by one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])  # for the tests' own modules
    command = [sys.executable, str(Path(__file__).parent / "float_programs.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_matrix_product_and_attention_run_vllms_float_instructions(report):
    compared = {name: row for name, row in report.items() if name != "control"}
    assert len(compared) == 3 * (2 * 3 + 2)
    assert all(row["instructions"] > 20 for row in compared.values()), compared
    assert {name: row["differ"] for name, row in compared.items() if row["differ"]} == {}


def test_control_another_tile_fusion_or_number_of_warps_is_found(report):
    assert len(report["control"]) == 5
    assert all(report["control"].values()), report["control"]
