"""A transformers model against itself: a way that changes bits is named, with the module where it starts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from zerokl.cli import main
from zerokl.engine.runs.checks.variants import WAYS, compare_ways

PAIRS = [((5, 6, 7), (10, 11, 12, 13)), ((20, 21, 22, 23, 24, 25), (30, 31, 32))]
CPU = torch.device("cpu")


def rows(model: Path, dtype: str = "float32") -> dict[str, dict]:
    return {row["way"]: row for row in compare_ways(model, PAIRS, dtype, CPU)}


@pytest.fixture(scope="module")
def dropout(model, tmp_path_factory) -> Path:
    """The model with dropout in its attention, as a config of transformers can ask for."""
    folder = tmp_path_factory.mktemp("dropout") / "model"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    return folder


def test_a_plain_model_changes_only_by_autocast_and_rounding(model):
    ways = rows(model)
    assert list(ways) == [way.name for way in WAYS]
    for name in ("gradients on", "train mode", "gradient checkpointing"):
        assert (ways[name]["unequal"], ways[name]["first"]) == (0, "")
    assert ways["autocast to bf16"]["unequal"] > 0
    assert ways["autocast to bf16"]["first"].startswith("model.layers.0")
    for name in ("right padding", "left padding", "left padding without position_ids"):
        assert ways[name]["max_abs"] < 1e-5  # RoPE sees distances only, so a shift of all positions rounds


def test_dropout_is_found_in_train_mode_and_nowhere_else(dropout):
    ways = rows(dropout)
    assert ways["train mode"]["unequal"] > 0
    assert ways["gradient checkpointing"]["unequal"] > 0
    assert ways["gradients on"]["unequal"] == 0
    assert ways["left padding"]["max_abs"] < 1e-5
    assert ways["train mode"]["first"] == "model.layers.0.self_attn.o_proj"
    assert "dropout" in ways["train mode"]["remedy"]


def test_padding_without_a_mask_is_read(model):
    way = rows(model)["left padding without a mask"]
    assert way["unequal"] > 0
    assert way["max_abs"] > 100 * rows(model)["left padding"]["max_abs"]
    assert way["first"] == "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize("what", ["missing", "another shape"])
def test_a_weight_that_transformers_would_fill_at_random_is_refused(model, tmp_path, capsys, what):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    weight = weights.pop(name)
    if what == "another shape":
        weights[name] = weight[:-16].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert main(["variants", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"lacks 1 weights, or has them in another shape; the first is {name}" in line


def test_the_command_prints_each_way(model, capsys):
    assert main(["variants", str(model)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "autocast" in out
    assert main(["variants", "no/such/model"]) == 2


def test_an_architecture_that_zerokl_does_not_compute_is_compared(tmp_path, model, capsys):
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    assert main(["variants", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "train mode" in out
    assert "…" not in out, "a module's name is shown whole"


@pytest.mark.parametrize(
    ("fields", "expected"), [({"vocab_size": "x"}, "vocab_size"), ({"hidden_size": -1}, "variants")]
)
def test_a_model_that_transformers_cannot_load_is_one_line(tmp_path, model, capsys, fields, expected):
    shutil.copytree(model, tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | fields))
    assert main(["variants", str(tmp_path / "m")]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
