"""Runs whose sums have leaves (precision.leaves): exact, in one ledger however the work is cut."""

import json
from pathlib import Path

import pytest
from zerokl.engine.config.compatibility import check_settings
from zerokl.engine.runs.run import train
from zerokl.engine.train.monitor import MismatchError
from zerokl.kernels import draw_cpp
from zerokl.kernels.leaves import Leaves
from zerokl.model.families import MODEL_TYPES

from tests.helpers import fingerprint, threads
from tests.random_model import EXPERTS, TWO_LAYERS, random_model

EIGHT_HEADS = TWO_LAYERS | {"num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.fixture(scope="module")
def eight(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("eight"), EIGHT_HEADS, 1.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_run_is_exact_and_cuts_of_the_work_change_no_bit(config, eight, tmp_path, dtype):
    common = {"model": eight, "steps": 2, "dtype": dtype, "precision__leaves": 8}
    cuts = {"plain": {}, "cut": {"micro_batch": 1, "native__max_batch_tokens": 5, "recompute": "layer"}}
    for name, more in cuts.items():
        with threads(1 + (name == "cut")):
            summary = train(config(**common, **more), tmp_path / name)
        assert (summary.tokens_unequal, summary.mismatch_max_abs) == (0, 0.0)
    assert fingerprint(tmp_path / "plain") == fingerprint(tmp_path / "cut")


def test_leaves_are_in_the_head_only_where_they_are_set(config, eight, tmp_path):
    for leaves in (1, 4):
        train(config(model=eight, steps=1, precision__leaves=leaves), tmp_path / str(leaves))
    heads = [json.loads(next(open(tmp_path / x / "ledger.jsonl")))["settings"] for x in ("1", "4")]
    assert "precision.leaves" not in heads[0]
    assert heads[1] == heads[0] | {"precision.leaves": 4}
    assert fingerprint(tmp_path / "1") != fingerprint(tmp_path / "4")


def test_control_a_sampler_without_leaves_stops_the_run(config, eight, tmp_path, monkeypatch):
    drawn = draw_cpp.drawn_logprobs
    monkeypatch.setattr(draw_cpp, "drawn_logprobs", lambda z, u, leaves: drawn(z, u, 1))
    monkeypatch.setattr(Leaves, "alone", property(lambda self: Leaves()))
    with pytest.raises(MismatchError):
        train(config(model=eight, steps=1, precision__leaves=8), tmp_path / "run")


REFUSED = {
    "experts": ({"precision__leaves": 2}, EXPERTS, "has a MixtureOfExperts, whose sums have no leaves"),
    "hybrid": ({"precision__leaves": 2}, "qwen3_5_text", "has a DeltaNet, whose sums have no leaves"),
    "wide norms": ({"precision__leaves": 2}, "olmo2", "has a Attention, whose sums have no leaves"),
    "heads": ({"precision__leaves": 8}, TWO_LAYERS, r"must divide kv_heads \(2\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_leaves_is_refused_in_one_line(config, tmp_path, case):
    settings, widths, message = REFUSED[case]
    if isinstance(widths, str):
        widths = TWO_LAYERS | {"model_type": widths} | dict(MODEL_TYPES[widths].small)
    with pytest.raises(ValueError, match=message) as error:
        train(config(model=random_model(tmp_path, widths), steps=1, **settings), tmp_path / "run")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sampler", ["vllm-exact", "vllm-zerokl"])
def test_samplers_without_leaves_are_refused(config, eight, tmp_path, sampler):
    with pytest.raises(ValueError, match=rf'precision.leaves \(2\) with sampler "{sampler}"'):
        train(config(model=eight, steps=1, precision__leaves=2, sampler=sampler), tmp_path / "run")


@pytest.mark.parametrize("more", [{"lora__rank": 2}, {"parallel__tensor": 2}], ids=str)
def test_on_a_gpu_leaves_are_taken_without_adapters_and_shared_layers(config, eight, more):
    settings = {"model": eight, "precision__leaves": 2}
    check_settings(config(**settings), "cuda")
    with pytest.raises(ValueError, match=r"^config: (precision.leaves|parallel.tensor) \(2\)") as error:
        check_settings(config(**settings, **more), "cuda")
    assert "\n" not in str(error.value)
    check_settings(config(**settings, **more), "cpu")


DENSE = ("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.full
def test_every_dense_family_is_exact(config, tmp_path, name):
    widths = EIGHT_HEADS | {"model_type": name} | dict(MODEL_TYPES[name].small)
    model = random_model(tmp_path, widths, 1.5)
    assert train(config(model=model, steps=1, precision__leaves=4), tmp_path / "run").mismatch_max_abs == 0.0
