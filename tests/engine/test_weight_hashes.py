"""Hashes of weights: a sync that went wrong is named, tensor by tensor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerokl.cli import main
from zerokl.integrations.weights import write_weight_hashes

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
    ("change", "said"),
    [
        (one_bit, f"{Q}: equal only once both are rounded to bfloat16"),
        (another_layer, f"{Q}: the first holds what the second has as {Q.replace('layers.1', 'layers.0')}"),
        (lambda t: t | {Q: torch.zeros_like(t[Q])}, f"{Q}: other values"),
        (lambda t: {k: v for k, v in t.items() if k != Q}, f"{Q}: only the second has it"),
        (lambda t: t | {K: t[K].T.contiguous()}, f"{K}: shape"),
    ],
)
def test_the_tensor_that_differs_is_named(model, tmp_path, capsys, change, said):
    other = changed(model, tmp_path / "other.safetensors", change)
    assert main(["weights", str(other), str(model)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert said in out
    assert "1 of " in out


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
