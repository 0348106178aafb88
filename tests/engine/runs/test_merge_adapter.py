"""`zerokl merge`: the merged model has the bits that the run computed with; another base is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerokl.cli import main
from zerokl.engine.config.lora_section import LoraConfig
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.run import train
from zerokl.engine.train.parallel.tree_hash import hash_tree
from zerokl.model.adapters import adapted_layout
from zerokl.model.checkpoint import read_weights
from zerokl.model.config import ModelConfig
from zerokl.verify.compare_runs import open_run

LORA = LoraConfig(rank=2, alpha=5.0, targets=("k_proj", "up_proj", "down_proj"))


@pytest.fixture(scope="module")
def base(model, tmp_path_factory) -> Path:
    """The model in bf16, so that the base is kept in bf16 as well."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("base") / "model")
    weights = {name: w.bfloat16() for name, w in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def lora(request, config, base) -> Config:
    return config(model=base, dtype=request.param, steps=2).model_copy(update={"lora": LORA})


@pytest.fixture(scope="module")
def checkpoint(lora, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "run"
    train(lora, path)
    return path / "checkpoints" / "step-000002"


def merge_root(folder: Path, dtype: torch.dtype) -> str:
    """The ledger's hash of the adapted weights of a model."""
    layout = adapted_layout(ModelConfig.from_file(folder), LORA.shape)
    return hash_tree(layout.blocks, read_weights(folder, layout).to(dtype)).root


def test_the_merged_model_has_the_bits_that_the_run_computed_with(lora, checkpoint, base, tmp_path, capsys):
    computed = open_run(checkpoint.parents[1]).lines[-1].quantities["compute_weights"]
    for dtype in (lora.dtype, "float32"):  # rounded here, or by whoever reads it
        target = tmp_path / dtype if not (tmp_path / dtype).exists() else tmp_path / "again"
        assert main(["merge", str(checkpoint), str(target), "--dtype", dtype]) == 0
        assert f"merged into {base}" in " ".join(capsys.readouterr().out.split())
        assert load_file(target / "model.safetensors")["model.norm.weight"].dtype == getattr(torch, dtype)
        assert merge_root(target, getattr(torch, lora.dtype)) == computed
    assert merge_root(base, getattr(torch, lora.dtype)) != computed, "control"
    before, after = (load_file(folder / "model.safetensors") for folder in (base, target))
    assert {n for n in before if not torch.equal(before[n].float(), after[n])} == {
        name for name in before if any(target in name for target in LORA.targets)
    }


def test_another_base_is_refused_by_name(checkpoint, base, tmp_path, capsys):
    other = shutil.copytree(base, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert main(["merge", str(checkpoint), str(tmp_path / "m"), "--base", str(other)]) == 2
    assert "merge: model.norm.weight of" in " ".join(capsys.readouterr().err.split())
    # Outside of its run nothing binds the base.
    alone = shutil.copytree(checkpoint, tmp_path / "adapter")
    assert main(["merge", str(alone), str(tmp_path / "m"), "--base", str(other)]) == 0


def test_what_cannot_be_merged_is_refused(checkpoint, base, tmp_path, capsys):
    adapter = shutil.copytree(checkpoint, tmp_path / "adapter")
    file = adapter / "adapter_config.json"
    raw = json.loads(file.read_text())
    for changes, message in (
        ({"base_model_name_or_path": None}, "add --base MODEL"),
        ({"use_dora": True}, "use_dora (True) is refused; only plain LoRA is built"),
        ({"r": 4}, "must be (4, 128)"),
    ):
        file.write_text(json.dumps(raw | changes))
        assert main(["merge", str(adapter), str(tmp_path / "m")]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert main(["merge", str(base), str(tmp_path / "m")]) == 2
    assert "holds no adapter_config.json" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "m").exists()
    (tmp_path / "m").mkdir()
    assert main(["merge", str(checkpoint), str(tmp_path / "m")]) != 0


@pytest.mark.parametrize("side", ["adapter", "base"])
def test_what_is_not_finite_is_not_merged(side, checkpoint, base, tmp_path, capsys):
    folders = {"adapter": shutil.copytree(checkpoint, tmp_path / "adapter")}
    folders["base"] = shutil.copytree(base, tmp_path / "base")
    file = folders[side] / ("adapter_model.safetensors" if side == "adapter" else "model.safetensors")
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    words = ["merge", str(folders["adapter"]), str(tmp_path / "m"), "--base", str(folders["base"])]
    assert main(words) == 2
    assert f"{name} holds 1 NaN" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "m").exists()
