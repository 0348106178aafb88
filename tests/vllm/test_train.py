"""`train --sampler vllm-zerokl` gives the weights and the fingerprint of a run with the native sampler."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

RUN = [
    "--steps",
    "30",
    "--prompts",
    "8",
    "--num_generations",
    "4",
    "--sampling.max_tokens",
    "6",
    "--evaluation.every",
    "10",
    "--optimizer.lr",
    "3e-4",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "model"
    _zerokl("init", str(out), "--task", "add")
    return out


def _zerokl(*words: str) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).with_name("zerokl")), *words]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-3000:]
    return process


def _fingerprint(base: Path, run: Path, *words: str) -> tuple[str, str]:
    _zerokl("train", "--preset", "demo", "--run_dir", str(run), "--model", str(base), *RUN, *words)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["tokens_unequal"], summary["mismatch_max_abs"]) == (0, 0.0)
    assert summary["steps"] == 30
    return summary["fingerprint"], summary["weights"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fingerprint_is_that_of_the_native_sampler(base, tmp_path, dtype):
    native = _fingerprint(base, tmp_path / "native", "--dtype", dtype)
    words = ("--dtype", dtype, "--sampler", "vllm-zerokl")
    assert _fingerprint(base, tmp_path / "vllm", *words) == native
    separate_process = ("--vllm.multiprocess", "true")
    assert _fingerprint(base, tmp_path / "separate", *words, *separate_process) == native
    other_seed = _fingerprint(base, tmp_path / "other", *words, "--seed", "1")
    assert other_seed[1] != native[1], "the seed must matter"


@pytest.mark.parametrize("separate_process", ["false", "true"])
def test_frozen_weights_lie_in_vllm_where_they_lie_in_the_trainer(base, tmp_path, separate_process):
    """Frozen weights follow the trained ones, so the embedding does not lie first here."""
    words = ("--dtype", "bfloat16", "--frozen", "model.embed_tokens.*", "--frozen", "model.layers.0.mlp.*")
    native = _fingerprint(base, tmp_path / "native", *words)
    vllm = ("--sampler", "vllm", "--vllm.multiprocess", separate_process)
    assert _fingerprint(base, tmp_path / "vllm", *words, *vllm) == native
