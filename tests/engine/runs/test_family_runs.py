"""Runs of a small model of every family: exactly on-policy, and the same bits however the work is cut."""

from functools import cache
from pathlib import Path

import pytest
import torch
from zerokl.engine.config.run_config import ParallelConfig
from zerokl.engine.runs.init import PRESETS, preset_config, random_decoder
from zerokl.engine.runs.memory import activation_bytes
from zerokl.engine.runs.run import train
from zerokl.engine.runs.samplers import refuse_uncompared
from zerokl.model.decoder import Decoder
from zerokl.model.families import MODEL_TYPES
from zerokl.model.operations import layer_bytes_per_token

from tests.engine.runs.exact_runs import train_exactly
from tests.engine.runs.test_memory import kept_bytes
from tests.helpers import fingerprint
from tests.random_model import TWO_LAYERS, random_model

# The dtype and the settings of a run.
SETTINGS: dict[str, dict[str, object]] = {
    "plain": {"dtype": "float16"},
    "adapters": {"dtype": "bfloat16", "lora__rank": 3},
    "quantised": {"dtype": "bfloat16", "precision__weights": "float8_e4m3fn/block32"},
    "fsdp": {"dtype": "float32"},
}
# How the work is cut decides no bit.
CUT = {"micro_batch": 1, "native__max_concurrency": 2, "native__max_batch_tokens": 7, "recompute": "layer"}


# In `make test`, whose blocks hold those of the others.
QUICK = ("qwen3", "glm4_moe", "qwen3_moe", "gemma2", "olmo2", "qwen3_5_text")
TYPES = [x if x in QUICK else pytest.param(x, marks=pytest.mark.full) for x in MODEL_TYPES]


@pytest.fixture(scope="module", params=TYPES)
def folder(request, tmp_path_factory) -> Path:
    widths = TWO_LAYERS | {"model_type": request.param} | dict(MODEL_TYPES[request.param].small)
    return random_model(tmp_path_factory.mktemp(request.param), widths, 1.5)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_run_is_exact_and_its_bits_do_not_depend_on_the_cut(config, folder, settings, tmp_path):
    plain = config(model=folder, steps=2, **SETTINGS[settings])
    other = config(model=folder, steps=2, **SETTINGS[settings], **CUT)
    if settings == "fsdp":
        other = other.model_copy(update={"parallel": ParallelConfig(engine="fsdp")})
    train_exactly(plain, tmp_path / "plain")
    train(other, tmp_path / "cut")
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "plain")


def test_a_hybrid_that_reads_prompts_once_is_exact_and_its_bits_do_not_depend_on_the_cut(
    config, read_jsonl, tmp_path
):
    """The control: gradients through a prompt of each sample have other bits, log-probabilities do not."""
    widths = TWO_LAYERS | {"model_type": "qwen3_5_text"} | dict(MODEL_TYPES["qwen3_5_text"].small)
    words = {"model": random_model(tmp_path / "model", widths, 1.5), "steps": 2, "dtype": "float16"}
    train_exactly(config(**words), tmp_path / "each")
    words["precision__state_prompts"] = "once"
    train_exactly(config(**words), tmp_path / "plain")
    train(config(**words, **CUT, shards_in_flight=2), tmp_path / "cut")
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "plain") != fingerprint(tmp_path / "each")
    each, once = (read_jsonl(tmp_path / name / "ledger.jsonl") for name in ("each", "plain"))
    assert once[0]["settings"] == each[0]["settings"] | {"precision.state_prompts": "once"}
    first = [dict(ledger[1]["quantities"]) for ledger in (each, once)]
    names = "gradient", "optimizer", "weights", "compute_weights"
    assert {name for name in first[0] if first[0][name] != first[1][name]} == set(names)


@pytest.mark.parametrize(
    ("model_type", "words", "message"),
    [
        ("llama", {}, "LlamaForCausalLM has no layer with a state"),
        ("qwen3_5_text", {"parallel": ParallelConfig(engine="fsdp")}, "precision.state_prompts"),
    ],
)
def test_prompts_of_states_are_refused_where_nobody_reads_them(config, tmp_path, model_type, words, message):
    widths = TWO_LAYERS | {"model_type": model_type} | dict(MODEL_TYPES[model_type].small)
    folder = random_model(tmp_path / "model", widths, 1.5)
    settings = config(model=folder, steps=1, precision__state_prompts="once").model_copy(update=words)
    with pytest.raises(ValueError, match=message):
        train(settings, tmp_path / "run")


@cache
def preset(name: str) -> Decoder:
    """The model of a preset, of random weights, which nobody changes."""
    return random_decoder(name, 40, 0)


def test_every_family_is_a_preset_of_init_that_has_its_fields():
    for name, family in MODEL_TYPES.items():
        raw = preset_config(name, 40).raw
        assert raw["architectures"] == [family.architecture]
        assert {key: raw[key] for key in family.small} == dict(family.small)
        assert name in PRESETS


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_vllms_own_model_of_a_family_is_refused_where_nobody_compared_it(model_type):
    architecture = MODEL_TYPES[model_type].architecture
    if model_type in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        refuse_uncompared(architecture)
    else:
        with pytest.raises(ValueError, match=f"nobody has compared vLLM's own {architecture} .*vllm-zerokl"):
            refuse_uncompared(architecture)


@pytest.mark.parametrize(
    "model_type", [name for name, family in MODEL_TYPES.items() if "num_experts" not in family.small]
)
def test_the_predicted_activations_are_those_that_are_kept(model_type):
    decoder, rows = preset(model_type), 96
    predicted = activation_bytes(decoder.layout, torch.float32, rows, recompute=False)
    layer = layer_bytes_per_token(decoder.config, 4) * rows
    measured = kept_bytes(decoder, rows)
    assert 0.8 < measured / (predicted - layer) < 1.25, (measured, predicted)
