"""verl's own worker over zerokl's kernels: verl's metrics of the mismatch are 0.0 at every step."""

import json
import subprocess
from pathlib import Path

import pytest
from zerokl.verify.run_environment import PACKAGE_ROOT

from tests.helpers import torchrun
from tests.random_model import TWO_LAYERS, random_model

pytestmark = pytest.mark.verl

DIFFERENCES = ("max", "mean", "std")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("verl"), TWO_LAYERS, sharper=2.0)


def run(model: Path, out: Path, ranks: int, dtype: str, *options: str) -> list[list[dict]]:
    """The steps of each rank."""
    command = torchrun(ranks, "-m", "tests.verl.exact_runs", str(model), str(out), dtype, *options)
    process = subprocess.run(command, cwd=PACKAGE_ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(ranks)]


def check_exact(step: dict) -> None:
    assert step["training/rollout_probs_diff_valid"] == 1
    assert [step[f"training/rollout_probs_diff_{name}"] for name in DIFFERENCES] == [0.0] * 3
    assert (step["kl"], step["k3_kl"], step["unequal"]) == (0.0, 0.0, 0)
    assert step["tokens"] > 10


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
def test_in_one_process_verls_metric_is_zero_and_stale_weights_turn_it_nonzero(model, tmp_path, dtype):
    command = torchrun(1, "-m", "tests.verl.in_process", str(model), str(tmp_path / "out"), dtype)
    process = subprocess.run(command, cwd=PACKAGE_ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    steps = json.loads((tmp_path / "out.json").read_text())
    assert [step["unequal"] == 0 for step in steps] == [True, True, False, True]
    for step in steps:
        exact = step["unequal"] == 0
        assert (step["training/rollout_probs_diff_max"] == 0.0) == exact
        assert (step["kl"] == 0.0) == exact
        assert step["tokens"] > 10


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
def test_verls_own_metrics_are_zero_before_and_after_updates(model, tmp_path, dtype):
    (steps,) = run(model, tmp_path / "one", 1, dtype)
    for step in steps:
        check_exact(step)
    assert len({str(step["digests"]) for step in steps}) == len(steps), "the weights change, and the keys"


def test_two_ranks_draw_what_one_draws(model, tmp_path):
    """Before an update, whose gradient verl adds up in an order that depends on the ranks."""
    (one,), two = run(model, tmp_path / "one", 1, "bf16"), run(model, tmp_path / "two", 2, "bf16")
    for step in (step for rank in two for step in rank):
        check_exact(step)
    assert two[0][0]["digests"] | two[1][0]["digests"] == one[0]["digests"]


def test_control_stale_weights_of_the_rollout_turn_verls_metric_nonzero(model, tmp_path):
    (steps,) = run(model, tmp_path / "stale", 1, "bf16", "--stale")
    for step in steps[:-1]:
        check_exact(step)
    assert steps[-1]["training/rollout_probs_diff_max"] > 0.0
    assert steps[-1]["kl"] != 0.0
    assert steps[-1]["unequal"] > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.actor.strategy=fsdp", "actor.strategy ('fsdp') is refused: set fsdp2"),
        ("actor_rollout_ref.model.lora_rank=8", "model.lora_rank (8) is refused"),
        ("actor_rollout_ref.rollout.top_k=5", "rollout.top_k (5) must be -1"),
        ("actor_rollout_ref.rollout.ignore_eos=true", "rollout.ignore_eos (True) must be False"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(model, tmp_path, override, message):
    command = torchrun(
        1, "-m", "tests.verl.exact_runs", str(model), str(tmp_path / "refused"), "bf16", override
    )
    process = subprocess.run(command, cwd=PACKAGE_ROOT, capture_output=True, text=True, check=False)
    assert process.returncode != 0
    assert f"exact_verl: {message}" in process.stderr
