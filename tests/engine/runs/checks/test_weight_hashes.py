"""Hashes of weights: a sync that went wrong is named, tensor by tensor."""

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from zerokl.cli import main
from zerokl.engine.runs.checks.tensor_hashes import tensor_hashes
from zerokl.integrations.weights import write_weight_hashes

from tests.helpers import property_settings, randn

Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def changed(model: Path, path: Path, change) -> Path:
    tensors = load_file(model / "model.safetensors")
    save_file(change(tensors), path)
    return path


def one_bit(tensors: dict) -> dict:
    tensors[Q].view(torch.int32)[0, 0] ^= 1
    return tensors


def another_layer(tensors: dict) -> dict:
    return tensors | {Q: tensors[Q.replace("layers.1", "layers.0")].clone()}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (one_bit, f"{Q}: equal only once both are rounded to bfloat16"),
        (another_layer, f"{Q}: the first holds what the second has as {Q.replace('layers.1', 'layers.0')}"),
        (lambda t: t | {Q: torch.zeros_like(t[Q])}, f"{Q}: other values"),
        (lambda t: {k: v for k, v in t.items() if k != Q}, f"{Q}: only the second has it"),
        (lambda t: t | {K: t[K].T.contiguous()}, f"{K}: shape"),
    ],
)
def test_the_tensor_that_differs_is_named(model, tmp_path, capsys, change, expected):
    other = changed(model, tmp_path / "other.safetensors", change)
    assert main(["weights", str(other), str(model)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert expected in out
    assert "1 of " in out


def test_no_more_tensors_differ_than_there_are(model, tmp_path, capsys):
    """Each name of the second is another one: both sides' tensors count."""
    other = changed(model, tmp_path / "other.safetensors", lambda t: {f"base.{k}": v for k, v in t.items()})
    count = len(load_file(other))
    assert main(["weights", str(model), str(other)]) == 1
    assert f"{2 * count} of {2 * count} tensors differ" in capsys.readouterr().out


def test_a_sync_in_bf16_is_no_difference(model, tmp_path, capsys):
    synced = changed(model, tmp_path / "bf16.safetensors", lambda t: {k: v.bfloat16() for k, v in t.items()})
    assert main(["weights", str(model), str(synced)]) == 0
    assert "0 of " in capsys.readouterr().out


class Fused(torch.nn.Module):
    """Weights as vLLM keeps them: q, k and v in one matrix, gate and up in another."""

    def __init__(self, folder: Path):
        super().__init__()
        self.config = type("Config", (), json.loads((folder / "config.json").read_text()))
        tensors = load_file(folder / "model.safetensors")
        for name in list(tensors):
            for fused, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
                if f".{parts[0]}_proj." in name:
                    stem = name.replace(f"{parts[0]}_proj", "{}")
                    rows = torch.cat([tensors.pop(stem.format(f"{part}_proj")) for part in parts])
                    tensors[stem.format(fused)] = rows
        self.tensors = tensors

    def named_parameters(self):
        return iter(self.tensors.items())


def test_an_engine_with_fused_weights_is_compared_with_its_checkpoint(model, tmp_path, capsys):
    engine = Fused(model)
    write_weight_hashes(engine, tmp_path / "engine.json")
    assert main(["weights", str(tmp_path / "engine.json"), str(model)]) == 0
    engine.tensors["model.layers.1.self_attn.qkv_proj.weight"][0, 0] += 1.0
    write_weight_hashes(engine, tmp_path / "after.json")
    capsys.readouterr()
    assert main(["weights", str(tmp_path / "after.json"), str(model)]) == 1
    assert f"{Q}: other values" in capsys.readouterr().out


# --- experts ---


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> tuple[Qwen3MoeForCausalLM, Path]:
    """A Qwen3-MoE of transformers, with all experts in one tensor, and its checkpoint, with one each."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("experts")
    model.save_pretrained(folder)
    return model, folder / "model.safetensors"


def _swap_gate_and_up(gate_up: torch.Tensor) -> None:
    gate_up.copy_(torch.cat(gate_up.chunk(2, dim=1)[::-1], dim=1))


def _interleave_rows(gate_up: torch.Tensor) -> None:
    """Gate and up row by row, as some kernels of TensorRT-LLM read them."""
    gate_up.copy_(torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1, 2))


def _rotate_experts(gate_up: torch.Tensor) -> None:
    gate_up.copy_(gate_up.roll(1, dims=0))


def _rotate_rows(gate_up: torch.Tensor) -> None:
    """The layout of a kernel: other rows inside each half."""
    gate_up.copy_(torch.cat([half.roll(3, dims=1) for half in gate_up.chunk(2, dim=1)], dim=1))


@pytest.mark.parametrize(
    ("corrupt", "expected"),
    [
        (_swap_gate_and_up, "the first holds what the second has as model.layers.0.mlp.experts.0.up_proj"),
        (
            _rotate_experts,
            "what the second has as model.layers.0.mlp.experts.3.gate_proj",
        ),
        (_rotate_rows, "the same values in another order"),
        (_interleave_rows, "other values"),
        (lambda w: w[2].zero_(), "mlp.experts.2.gate_proj.weight: other values"),
    ],
    ids=["gate and up swapped", "experts rotated", "another layout", "interleaved", "one expert lost"],
)
def test_experts_that_a_sync_corrupted_are_named(experts, tmp_path, capsys, corrupt, expected):
    """SkyRL#1680, verl#7978: after a sync the experts lie in another layout, or are lost."""
    model, checkpoint = experts
    write_weight_hashes(model, tmp_path / "sound.json")
    assert main(["weights", str(tmp_path / "sound.json"), str(checkpoint)]) == 0
    other = copy.deepcopy(model)
    with torch.no_grad():
        corrupt(other.model.layers[0].mlp.experts.gate_up_proj)
    write_weight_hashes(other, tmp_path / "corrupt.json")
    capsys.readouterr()
    assert main(["weights", str(tmp_path / "corrupt.json"), str(checkpoint)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert expected in out
    assert "layers.1." not in out


@property_settings(60)
@given(st.integers(0, 1000), st.integers(2, 200), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_unordered_hash_is_of_the_values_alone(seed, n, dtype):
    values = randn(seed, n).to(dtype)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))

    def unordered(x: torch.Tensor) -> str:
        return tensor_hashes([("w", x)])["w"]["unordered"][str(dtype).removeprefix("torch.")]

    assert unordered(values[order]) == unordered(values)
    changed = values.clone()
    changed[seed % n] = -changed[seed % n]
    assert unordered(changed) != unordered(values)


def test_a_weight_that_the_engine_dropped_is_named(model, tmp_path):
    engine = Fused(model)
    engine.tensors["model.layers.0.self_attn.qkv_proj.weight"] = torch.empty(0)
    with pytest.raises(ValueError, match="the engine has dropped it"):
        write_weight_hashes(engine, tmp_path / "engine.json")


def test_hashes_are_written_once(model, tmp_path, capsys):
    words = ["weights", str(model), "--out", str(tmp_path / "hashes.json")]
    assert main(words) == 0
    assert main(words) == 2
    assert main(["weights", str(tmp_path / "hashes.json"), str(model)]) == 0


@pytest.mark.parametrize("text", ["{}", "[1]", '{"tensors": {"a": 1}}', "{"])
def test_what_holds_no_hashes_is_refused_in_one_line(model, tmp_path, capsys, text):
    (tmp_path / "bad.json").write_text(text)
    assert main(["weights", str(tmp_path / "bad.json"), str(model)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_broken_file_is_refused_in_one_line(model, tmp_path, capsys):
    (tmp_path / "bad.safetensors").write_bytes(b"none")
    assert main(["weights", str(tmp_path / "bad.safetensors"), str(model)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["weights", str(model)]) == 2
