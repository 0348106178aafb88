"""Compiled for GPUs that need not be here, in a process of its own: Triton's interpreter and its compiler exclude each other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AHEAD_OF_TIME = Path(__file__).parent / "ahead_of_time.py"


@pytest.fixture(scope="module")
def report() -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(AHEAD_OF_TIME)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_binary_is_free_of_atomics_and_spills_and_as_recorded(report):
    assert report["binaries"] >= 4 * 6
    assert report["faults"] == []


def test_control_an_atomic_addition_is_found(report):
    assert {line.split(":")[0] for line in report["atomic"]} == {f"atomic on {t}" for t in ("sm_80", "sm_90", "sm_100", "gfx942")}
    assert all("atomic instructions" in line for line in report["atomic"])


def test_control_a_spill_and_a_regression_are_found(report):
    assert [line.split(":")[1] for line in report["spill"]] == [" 16 bytes of local memory a thread; registers spill"]
    assert len(report["regression"]) == 1
    assert "recorded" in report["regression"][0]


def test_control_another_order_or_fusion_changes_the_float_program(report):
    assert report["same"] == 0
    assert report["unfused"] > 0
    assert report["warps"] > 0
