"""`zerokl audit` with vLLM as the sampler, the trainer or both."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.integrations.recorder import Recorder
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.config import ModelConfig
from zerokl.model.operations import operation_names

from tests.audit.families import FAMILIES, write_family
from tests.vllm.forked import run_python

pytestmark = pytest.mark.vllm


def _audit(model: Path, out: Path, *words: str) -> tuple[int, dict]:
    """The exit code and the report of `zerokl audit` with these arguments."""
    command = ["audit", str(model), "-n", "64", "--max-tokens", "64", "--out", str(out), *words]
    process = run_python("-m", "zerokl", *command)
    assert (out / "audit.json").exists(), process.stdout[-1000:] + process.stderr[-3000:]
    assert (out / "audit.html").stat().st_size > 10_000
    return process.returncode, json.loads((out / "audit.json").read_text())


def test_vllm_with_zerokl_inside_equals_the_trainer(model, tmp_path):
    words = (
        "--sampler",
        "vllm-zerokl",
        "--trainer",
        "zerokl",
        "--temperature",
        "0.7",
        "--batch_invariance",
        "16",
        "--full_vocab",
    )
    code, report = _audit(model, tmp_path / "out", *words)
    assert (code, report["frac_equal"], report["k3"]["value"]) == (0, 1.0, 0.0)
    assert report["tokens"] > 1000
    assert report["batch_invariance"]["unequal_from"] is None
    assert report["full_vocab"]["frac_places_equal"] == 1.0
    assert "Zerokl" in report["engine_settings"]["sampler"]["attention backend"]


@pytest.mark.parametrize(
    "sides",
    [
        ("vllm", "zerokl"),
        pytest.param(("vllm-zerokl", "vllm"), marks=pytest.mark.full),
        *(pytest.param(sides, marks=pytest.mark.proof) for sides in (("vllm", "hf"), ("hf", "vllm"))),
    ],
)
def test_vllm_differs_and_the_first_operation_is_named(model, tmp_path, sides):
    code, report = _audit(model, tmp_path / "out", "--sampler", sides[0], "--trainer", sides[1])
    assert code == 1
    assert report["k3"]["value"] > 0
    assert report["first_divergence"]["op"] in operation_names(ModelConfig.from_file(model))
    assert {d["op"] for d in report["operations"]} == set(operation_names(ModelConfig.from_file(model)))


def test_vllm_draws_with_a_family_that_zerokl_has_no_decoder_of(tmp_path, monkeypatch):
    """Both sides are traced by their modules; vLLM's attention on a CPU needs heads of 32."""
    sizes = FAMILIES["GPT2"] | {"hidden_size": 128, "n_embd": 128}
    monkeypatch.setitem(FAMILIES, "GPT2", sizes)
    folder = write_family("GPT2", tmp_path / "GPT2")
    words = ["--sampler", "vllm", "--trainer", "hf", "--full_vocab"]
    code, report = _audit(folder, tmp_path / "out", *words)
    assert code == 1
    assert 0 < report["max_abs"] < 0.25
    assert report["cause"]["kind"] != "operation"
    compared = {d["op"] for d in report["operations"]}
    assert {"logits", "logprob"} <= compared
    assert "transformer.h.1.mlp.c_fc" in compared


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.proof), "bfloat16"])
def test_vllms_mixture_of_experts_has_no_fault(moe, tmp_path, dtype):
    """vLLM's own routers and experts beside ours, each judged by the checkpoint."""
    words = ("--sampler", "vllm", "--trainer", "zerokl", "--dtype", dtype)
    report = _audit(moe, tmp_path / "out", *words)[1]
    assert (report["jump"], report["one_sided"]) == (None, {"sampler": [], "trainer": []})
    assert {"layers.1.router", "layers.1.experts"} <= {d["op"] for d in report["operations"]}
    assert report["experts"]["places"] > 15
    assert "CPU" in report["engine_settings"]["sampler"]["MoE backend"]


@pytest.mark.full
def test_vllm_against_itself_parts_at_no_operation(model, tmp_path):
    # One engine draws and scores. Only the company of a token in a forward can make a difference.
    report = _audit(model, tmp_path / "out", "--sampler", "vllm", "--trainer", "vllm")[1]
    assert report["first_divergence"] is None


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--temperature", "0.7"), marks=pytest.mark.full),
        pytest.param(("--temperature", "0"), marks=pytest.mark.full),
        ("--temperature", "1.3", "--top-k", "20", "--min-p", "0.05"),
    ],
)
def test_vllm_scores_the_distribution_that_was_drawn_from(model, tmp_path, words):
    words = ("--sampler", "native", "--trainer", "vllm", "--dtype", "float32", "--full_vocab", *words)
    report = _audit(model, tmp_path / "out", *words)[1]
    assert report["max_abs"] < 0.01, "another temperature would make tenths of a difference"
    assert report["full_vocab"]["max_abs"] < 0.01
    assert report["full_vocab"]["kl_sampler_trainer"]["value"] < 1e-5
    assert report["engine_settings"]["trainer"]["attention backend"] == "CPUAttentionBackend"


@pytest.mark.parametrize("temperature", [0.8, pytest.param(0.0, marks=pytest.mark.full)])
def test_vllm_scores_every_filter_that_a_log_declares(model, tmp_path, temperature):
    params = SamplingParams.of(temperature, 0, 0.95, 0.02, {9: 2.0, 20: -1.5}, range(1, 60, 2))
    sampler, prompts = NativeSampler(load_decoder(model, torch.float32)), [[5, 9], [20, 30, 41]] * 8
    with Recorder(
        tmp_path / "log.jsonl", **params._asdict() | {"logit_bias": dict(params.logit_bias)}
    ) as log:
        for r in complete(sampler, prompts, GenerationParams(params, 2, 20, frozenset()), RngKey(1, 0)):
            log.record(*r.pair, r.logprobs)
    words = ("--sampler", str(tmp_path / "log.jsonl"), "--trainer", "vllm", "--dtype", "float32")
    report = _audit(model, tmp_path / "out", *words)[1]
    assert report["max_abs"] < 0.01


@pytest.mark.full
def test_vllm_with_wide_logits(model, tmp_path):
    sides = ("--sampler", "vllm", "--trainer", "zerokl")
    wide_logits = ("--sampler-head-dtype", "float32", "--head-dtype", "float32")
    narrow = _audit(model, tmp_path / "narrow", *sides)[1]
    wide = _audit(model, tmp_path / "wide", *sides, *wide_logits)[1]
    assert wide["k3"]["value"] < narrow["k3"]["value"]


@pytest.mark.full
def test_zerokl_inside_vllm_with_wide_logits_equals_the_trainer(model, tmp_path):
    words = ("--sampler", "vllm-zerokl", "--trainer", "zerokl", "--head-dtype", "float32")
    assert _audit(model, tmp_path / "out", *words)[0] == 0


def _report(script: str, *words: str) -> dict:
    """The report of a script beside this file."""
    process = run_python(str(Path(__file__).with_name(script)), *words)
    lines = [line for line in process.stdout.splitlines() if line.startswith("REPORT")]
    assert lines, process.stderr[-3000:]
    return json.loads(lines[0].removeprefix("REPORT"))


def _with_a_flipped_bit(model: Path, folder: Path, rng: random.Random) -> str:
    """Copy the checkpoint, and flip a bit of a mantissa in a projection; return the operation."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    op = rng.choice(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    layer = rng.randrange(4)
    name = next(n for n in weights if n.startswith(f"model.layers.{layer}.") and f".{op}." in n)
    bits = weights[name].view(torch.int32).view(-1)
    bits[rng.randrange(len(bits))] ^= 1 << rng.randrange(14, 23)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return f"layers.{layer}.{op}"


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.proof)]
)
def test_a_difference_planted_in_vllm_is_found_where_it_is(model, tmp_path, seed):
    trace = str(tmp_path / "trace.safetensors")
    report = _report("audit_process.py", str(model), str(seed), trace)
    assert report["operations"] == operation_names(ModelConfig.from_file(model))
    assert report["again"] is None
    named = [(kind, op) for kind, _, op in report["planted"]]
    assert named == [(kind, expected) for kind, expected, _ in report["planted"]]
    expected = _with_a_flipped_bit(model, tmp_path / "flipped", random.Random(seed))
    assert _report("audit_process.py", str(tmp_path / "flipped"), str(seed), trace)["first"] == expected


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_a_stale_cache_is_named(model, seed):
    # none is the control: without the fault, after the same update, every token is equal.
    for fault in ("forgets", "none"):
        report = _report("stale_process.py", str(model), str(seed), fault, "zerokl")
        assert (report["frac_equal"] < 1.0) == (fault == "forgets")
        assert ("used a stale cache" in report["verdict"]) == (fault == "forgets")


@pytest.mark.full
def test_a_stale_cache_is_named_where_the_engines_part_anyway(model):
    for fault in ("forgets", "none"):
        report = _report("stale_process.py", str(model), "2", fault, "hf")
        assert "Bits first part at layers." in report["verdict"]
        assert ("used a stale cache" in report["verdict"]) == (fault == "forgets")


@pytest.mark.full
def test_what_only_vllms_process_computes_is_found_there(model):
    """vLLM's own decoder has another epsilon, and the trace is that of vLLM's forward."""
    report = _report("stale_process.py", str(model), "3", "inside", "zerokl")
    assert "Bits first part at layers.0.input_norm:" in report["verdict"]
