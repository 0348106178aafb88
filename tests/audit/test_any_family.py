"""Families that zerokl has no decoder of are audited by transformers alone: engines, folders, and logs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from zerokl.audit.command import run_audit
from zerokl.audit.conclusion.outcome import Kind
from zerokl.audit.config import AuditSettings
from zerokl.audit.engines.hf import HfEngine
from zerokl.engine.rollout.types import GenerationParams
from zerokl.kernels.sampling_params import SamplingParams

from tests.audit.families import FAMILIES, write_family

# The others of the matrix are for the whole suite. Of these three zerokl has a decoder.
OURS = ("Olmo2", "Gemma2", "GptOss")
QUICK = ("Mamba",)
NAMES = [pytest.param(x, marks=[] if x in QUICK else [pytest.mark.full]) for x in FAMILIES if x not in OURS]
PROMPTS = [[5, 60 + i, 70 + 2 * i, 90] for i in range(8)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("families"), {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = write_family(name, root / name)
        return made[name]

    return folder


def planted(folder: Path, target: Path) -> tuple[Path, str]:
    """A copy whose last matrix is a tenth larger, and that matrix's name."""
    shutil.copytree(folder, target)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    name, weight = [x for x in model.named_parameters() if x[1].dim() == 2][-1]
    with torch.no_grad():
        weight.mul_(1.1)
    model.save_pretrained(target)
    return target, name


def write_log(path: Path, folder: Path, temperature: float, declared: float) -> Path:
    """A log of a bf16 sampler."""
    params = GenerationParams(SamplingParams(temperature), 1, 24, frozenset({1}))
    rollouts = HfEngine(folder, torch.bfloat16).generate(PROMPTS, params, 0)
    rows = [
        {
            "prompt_ids": list(r.prompt_ids),
            "completion_ids": list(r.completion_ids),
            "logprobs": [float(x) for x in r.logprobs],
            "temperature": declared,
        }
        for r in rollouts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def audited(target: Path, trainer_model: str = "", **settings):
    return run_audit(
        str(target), trainer_model, None if "model" in settings else 4, AuditSettings(**settings)
    )


@pytest.mark.parametrize("name", NAMES)
def test_two_dtypes_are_compared_in_columns_vocabulary_batches_and_modules(folder_of, name):
    settings = dict(sampler="hf", trainer="hf", sampler_dtype="bfloat16", dtype="float32", max_tokens=8)
    report = audited(folder_of(name), **settings, full_vocab=True, batch_invariance=2)
    assert report.figures.tokens >= 16
    assert 0.0 < report.figures.max_abs < 2.0
    assert report.full_vocab.vocabulary == 260
    assert report.batch_invariance.requests == 2
    assert "embed" in report.trace.first_divergence.op or "wte" in report.trace.first_divergence.op
    assert len(report.trace.operations) > 12
    assert not any(report.trace.one_sided.values())
    assert report.cause.kind in ("dtype", "batch invariance")
    decoded = report.own_invariance["hf (trainer)"]["decode against prefill"]
    assert decoded.max_abs < 1e-4, "the cache of the family is used as it should be"


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_folder_is_told_by_its_tensor(folder_of, tmp_path, name):
    folder, tensor = planted(folder_of(name), tmp_path / "planted")
    report = audited(folder_of(name), sampler="hf", trainer=str(folder), dtype="float32", max_tokens=8)
    assert (report.outcome.kind, report.cause.kind) == (Kind.DIFFERS, "checkpoints")
    assert "1 of " in report.cause.text
    assert ("embed_out" if name == "GPTNeoX" else tensor) in report.cause.text
    control = audited(
        folder_of(name), sampler="hf", trainer=str(folder_of(name)), dtype="float32", max_tokens=8
    )
    assert control.cause.kind != "checkpoints"
    assert control.figures.max_abs < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_log_is_scored_by_transformers_and_a_setting_is_named(folder_of, tmp_path, name):
    sound = write_log(tmp_path / "sound.jsonl", folder_of(name), 0.9, 0.9)
    report = audited(sound, model=str(folder_of(name)), dtype="float32")
    assert report.trainer == "hf"
    # Where the engine repeats its own bits, the sampler's dtype explains the difference exactly.
    assert report.outcome.passed or report.cause.kind == "another dtype", report.cause
    note = next(x for x in report.log_notes if "not zerokl's decoder" in x)
    assert len(note) < 200, "it lists no families"
    hotter = write_log(tmp_path / "hotter.jsonl", folder_of(name), 0.7, 1.0)
    report = audited(hotter, model=str(folder_of(name)), dtype="float32")
    assert "temperature" in f"{report.cause.kind} {report.cause.text}", report.cause


def test_an_engine_that_has_no_decoder_of_a_family_says_which_have(folder_of):
    with pytest.raises(ValueError, match=r"native and zerokl cannot compute with it.*--sampler hf"):
        audited(folder_of("Mamba"))


def test_a_family_that_transformers_does_not_know_is_refused_in_a_sentence(folder_of, tmp_path):
    folder = tmp_path / "unknown"
    shutil.copytree(folder_of("Mamba"), folder)
    for name, match in (("t5", "no causal language model"), ("zerokl_new", "cannot load")):
        config = json.loads((folder / "config.json").read_text()) | {"model_type": name}
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NewLM"]}))
        with pytest.raises(ValueError, match=match) as error:
            audited(folder, sampler="hf", trainer="hf")
        assert "\n" not in str(error.value)


def test_a_trainer_that_is_named_is_not_changed_for_a_log_of_another_family(folder_of, tmp_path):
    log = write_log(tmp_path / "log.jsonl", folder_of("Mamba"), 1.0, 1.0)
    with pytest.raises(ValueError, match=r"zerokl cannot compute with it"):
        audited(log, model=str(folder_of("Mamba")), dtype="float32", trainer="zerokl")


def test_both_sides_are_traced_by_modules_where_one_folder_has_no_decoder(tmp_path, monkeypatch):
    """The same Qwen2, and one whose window, longer than any sequence, no decoder here computes."""
    monkeypatch.setitem(
        FAMILIES, "Qwen2", FAMILIES["Olmo2"] | dict(num_attention_heads=2, num_key_value_heads=2)
    )
    folder = write_family("Qwen2", tmp_path / "plain")
    shutil.copytree(folder, other := tmp_path / "window")
    config = json.loads((folder / "config.json").read_text())
    config |= dict(use_sliding_window=True, sliding_window=4096, layer_types=["sliding_attention"] * 2)
    (other / "config.json").write_text(json.dumps(config))
    report = audited(folder, sampler="hf", trainer=str(other), dtype="float32", max_tokens=4)
    assert not any(report.trace.one_sided.values())
    assert any("mlp.down_proj" in str(x) for x in report.trace.operations)
