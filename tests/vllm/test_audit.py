"""`zerokl audit` with vLLM on a side."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from zerokl.engine.audit.names import operations

pytestmark = pytest.mark.vllm


def _audit(model: Path, out: Path, *words: str) -> tuple[int, dict]:
    zerokl = str(Path(sys.executable).with_name("zerokl"))
    done = subprocess.run(
        [zerokl, "audit", str(model), "-n", "64", "--max-tokens", "64", "--out", str(out), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (out / "audit.json").exists(), done.stdout[-1000:] + done.stderr[-3000:]
    assert (out / "audit.html").stat().st_size > 10_000
    return done.returncode, json.loads((out / "audit.json").read_text())


def test_vllm_with_zerokl_inside_equals_the_trainer(model, tmp_path):
    code, report = _audit(model, tmp_path / "out", "--sampler", "vllm-zerokl", "--trainer", "zerokl", "--temperature", "0.7")
    assert (code, report["frac_equal"], report["k3"]["value"]) == (0, 1.0, 0.0)
    assert report["tokens"] > 1000


@pytest.mark.parametrize("sides", [("vllm", "hf"), ("vllm", "zerokl"), ("hf", "vllm")])
def test_stock_vllm_differs_and_the_first_operation_is_named(model, tmp_path, sides):
    code, report = _audit(model, tmp_path / "out", "--sampler", sides[0], "--trainer", sides[1])
    assert code == 1
    assert report["k3"]["value"] > 0
    assert report["first_divergence"]["op"] in operations(4)
    assert {d["op"] for d in report["operations"]} == set(operations(4)) - {"logits"}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_difference_planted_in_stock_vllm_is_found_where_it_is(model, seed):
    words = [sys.executable, str(Path(__file__).with_name("audit_process.py")), str(model), str(seed)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[0][5:])
    assert found["operations"] == [op for op in operations(4) if op != "logits"]
    assert found["again"] is None
    assert [(kind, op) for kind, _, op in found["planted"]] == [(kind, expected) for kind, expected, _ in found["planted"]]
