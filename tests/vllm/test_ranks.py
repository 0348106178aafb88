"""A vLLM on each rank of torchrun draws what one process draws with the native sampler.

The product of ranks, vLLM and weights of the sampler's own: each rank has its part of the prompts, and must
take the weights at every sync. A rank with stale weights, or with another seed, is seen.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers import torchrun, write_letters_reward
from tests.vllm.forked import run_python, run_ranks

pytestmark = pytest.mark.vllm

RUN = [
    *("--task.name", "add", "--task.options", "{ max_value = 9, train = 20, held_out = 10 }"),
    *("--steps", "3", "--prompts", "4", "--num_generations", "3", "--sampling.max_tokens", "6"),
    *("--optimizer.lr", "1e-2", "--evaluation.every", "3", "--evaluation.problems", "4", "--workers", "1"),
]
VLLM = ("--sampler", "vllm-zerokl", "--vllm.cache_bytes", "67108864")
STALE = ("--max_staleness", "2", "--updates_per_rollout", "2", "--dtype", "bfloat16")
LATE = ("--max_staleness", "1", "--staleness_schedule", "lagged")
NOISY = (
    *("--exact", "false", "--loss.preset", "tis"),
    *("--perturb.logit_noise", "0.1", "--perturb.temperature", "1.2"),
    *("--perturb.round_weights", "float8_e4m3fn", "--precision.sampler_dtype", "bfloat16"),
)
SEPARATE = ("--vllm.multiprocess", "true")


def _start(command: list[str]) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _alone(model: Path, run: Path, *words: str) -> dict:
    """The summary of a run of one process."""
    process = run_python("-m", "zerokl", "train", *_words(model, run, *words))
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-3000:]
    return _summary(run)


def _ranks(model: Path, run: Path, *words: str, fault: str = "") -> subprocess.CompletedProcess:
    """Two ranks. fault: see ranks_process.py."""
    script = (
        [str(Path(__file__).with_name("ranks_process.py")), fault] if fault else ["-m", "zerokl", "train"]
    )
    return _start(torchrun(2, *script, *_words(model, run, *words)))


def _words(model: Path, run: Path, *words: str) -> list[str]:
    """The reward makes every update move the weights."""
    write_letters_reward(run.parent)
    rewarded = ["--task.reward", "letters_reward:reward", "--task.directory", str(run.parent)]
    return [*RUN, *rewarded, "--model", str(model), "--run_dir", str(run), *words]


def _summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def _end(summary: dict) -> tuple[str, str]:
    return summary["fingerprint"], summary["weights"]


CASES = {
    "several updates a rollout, bf16": STALE,
    "fp32": (),
    "fp16, a process of its own": ("--dtype", "float16", *SEPARATE),
    "lagged": LATE,
    "lagged, noisy": LATE + NOISY,
    "noisy": NOISY,
    "late, a process of its own": (*NOISY, "--perturb.delay", "1", *SEPARATE),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if i == 0 else pytest.mark.proof) for i, case in enumerate(CASES)]
)
def test_two_ranks_with_vllm_have_the_ledger_of_one_process_with_the_native_sampler(model, tmp_path, case):
    words = CASES[case]
    native = _alone(model, tmp_path / "native", *(w for w in words if w not in SEPARATE))
    train_words = ["-m", "zerokl", "train", *_words(model, tmp_path / "ranks", *VLLM, *words)]
    run_ranks(2, train_words, tmp_path)
    ranked = _summary(tmp_path / "ranks")
    assert _end(ranked) == _end(native)
    lines = [(tmp_path / run / "rollouts.jsonl").read_bytes() for run in ("native", "ranks")]
    assert lines[0] == lines[1]
    if "--exact" not in words:
        assert (ranked["tokens_unequal"], ranked["mismatch_max_abs"]) == (0, 0.0)


@pytest.mark.proof
@pytest.mark.parametrize("case", ["fp32", "noisy"])
def test_one_process_with_vllm_has_it_too(model, tmp_path, case):
    native = _alone(model, tmp_path / "native", *CASES[case])
    assert _end(_alone(model, tmp_path / "vllm", *VLLM, *CASES[case])) == _end(native)


@pytest.mark.full
def test_control_stale_weights_on_one_rank_stop_the_run(model, tmp_path):
    """Its first step has the first weights, which are not stale."""
    process = _ranks(model, tmp_path / "run", *VLLM, fault="stale")
    assert process.returncode != 0
    output = process.stdout + process.stderr
    # The first prompts lie on rank 0, which is sound.
    assert re.search("mismatch at step 1, prompt [1-3],", output), output[-3000:]


@pytest.mark.proof
@pytest.mark.parametrize("fault", ["stale", "seed"])
def test_control_one_ranks_fault_changes_the_ledger(model, tmp_path, fault):
    """With weights of the sampler's own, what scores the old policy is not what is stale."""
    words = LATE if fault == "stale" else ()
    native = _alone(model, tmp_path / "native", *words)
    process = _ranks(model, tmp_path / "run", *VLLM, *words, fault=fault)
    if fault == "stale":
        assert re.search("mismatch at step 2, prompt [1-3],", process.stdout + process.stderr)
        return
    assert process.returncode == 0, process.stderr[-3000:]
    assert _summary(tmp_path / "run")["tokens_unequal"] == 0, "the draw is sound, and its key is not"
    assert _end(_summary(tmp_path / "run")) != _end(native)


@pytest.mark.proof
def test_vllm_as_it_comes_draws_on_each_rank_with_seeds_of_the_requests(model, tmp_path):
    """Its logprobs may depend on the batch by a rounding; the tokens of the first step do not here."""
    words = ("--sampler", "vllm", "--exact", "false", "--max_staleness", "1", "--perturb.temperature", "1.1")
    one = _alone(model, tmp_path / "one", *words)
    process = _ranks(model, tmp_path / "two", *words)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-3000:]
    assert one["mismatch_max_abs"] > 0.0
    drawn = [
        [json.loads(line)["completion_ids"] for line in (tmp_path / run / "rollouts.jsonl").open()][:12]
        for run in ("one", "two")
    ]
    assert drawn[0] == drawn[1]
    assert len({tuple(ids) for ids in drawn[0][:3]}) > 1, "samples of one prompt differ"
