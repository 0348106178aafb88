"""action.yml, run as a runner runs it: it passes only where something was audited."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
GOOD = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-1.0, -2.0], "temperature": 1.0}
GOOD["trainer_logprobs"] = GOOD["logprobs"]


def act(folder: Path, **inputs: str) -> tuple[int, str]:
    """The exit code of the action's second step, and all that it says."""
    step = next(step for step in ACTION["runs"]["steps"] if step.get("id") == "run")
    values = {name: row["default"] for name, row in ACTION["inputs"].items()} | inputs
    env = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name, value in step["env"].items():
        env[name] = values[value.removeprefix("${{ inputs.").removesuffix(" }}")]
    env |= {"GITHUB_STEP_SUMMARY": str(folder / "summary.md"), "GITHUB_OUTPUT": str(folder / "output")}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    return process.returncode, process.stdout + process.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bad = GOOD | {"trainer_logprobs": [-1.5, -2.5]}
    for name, row in (("good", GOOD), ("bad", bad), ("-bad", bad)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 2)
    return tmp_path


def test_a_log_passes_or_fails_by_its_tolerance(folder):
    (folder / "zerokl-junit.xml").write_text("of an earlier run")
    assert act(folder, log="good.jsonl")[0] == 0
    assert "<testsuites" in (folder / "zerokl-junit.xml").read_text()
    assert act(folder, log="bad.jsonl", args="--max_abs 0.1", out="second")[0] == 1


@pytest.mark.parametrize(
    "inputs",
    [
        {"log": "--help"},
        pytest.param({"log": "--version"}, marks=pytest.mark.full),
        pytest.param({"log": "-h"}, marks=pytest.mark.full),
        {"capsule": "--help"},
        pytest.param({"capsule": "--help", "sampler": "hf"}, marks=pytest.mark.full),
        {"log": "good.jsonl", "args": "--help"},
        pytest.param({"log": "good.jsonl", "args": "--version"}, marks=pytest.mark.full),
        {"log": "bad.jsonl", "model": "--help"},
        pytest.param({"log": "bad.jsonl", "band": "--help"}, marks=pytest.mark.full),
        {"log": "good.jsonl", "args": "--junit elsewhere.xml"},
        {"log": "-bad.jsonl", "args": "--max_k3 9\n--max_abs 0.1"},
    ],
    ids=str,
)
def test_what_looks_like_an_option_passes_no_gate(folder, inputs):
    (folder / "zerokl-junit.xml").write_text("of an earlier run")
    code, words = act(folder, **inputs)
    assert code in (1, 2), words
