"""torchtitan's own trainer over zerokl's model: the loss is CausalLM's, and 1 and 2 ranks are equal."""

import json
import subprocess
from pathlib import Path

import pytest
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.helpers import torchrun
from tests.random_model import TWO_LAYERS, random_model

pytestmark = pytest.mark.titan


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("titan"), TWO_LAYERS, sharper=2.0)


def run(model: Path, out: Path, ranks: int, dtype: str, *options: str) -> list[dict]:
    command = torchrun(ranks, "-m", "tests.titan.exact_runs", str(model), str(out), dtype, *options)
    process = subprocess.run(command, cwd=PACKAGE_ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_and_two_have_the_bits_of_causal_lm(model, tmp_path, dtype):
    (one,) = run(model, tmp_path / "one", 1, dtype)
    assert one["losses"][:4] == one["alone"], "the first step, sequence by sequence"
    two = run(model, tmp_path / "two", 2, dtype)
    assert {rank["weights"] for rank in two} == {one["weights"]}
    losses = [loss for pair in zip(*(rank["losses"] for rank in two), strict=True) for loss in pair]
    assert losses == one["losses"], "of all steps, after updates"


def test_control_without_the_tree_two_ranks_have_other_weights(model, tmp_path):
    (one,) = run(model, tmp_path / "one", 1, "float32", "--accumulated")
    two = run(model, tmp_path / "two", 2, "float32", "--accumulated")
    assert two[0]["weights"] != one["weights"]
    assert two[0]["losses"][0] == one["losses"][0]
