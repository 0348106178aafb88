"""Runs that train LoRA adapters: exact, the same bits however the work is cut, resumed, replayed, verified.

The ledger's quantities are those of A and B, and its head binds the base.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from zerokl.cli import main
from zerokl.engine.config.lora_section import LoraConfig
from zerokl.engine.config.run_config import Config
from zerokl.engine.config.sampling_section import NativeConfig
from zerokl.engine.runs.run import resume, train
from zerokl.files.bitwise import count_unequal
from zerokl.verify.compare_runs import open_run

from tests.engine.runs.exact_runs import faults, train_exactly
from tests.forged_run import (
    assert_another_frozen_weight_is_refused,
    assert_checkpoint_is_not_used,
    forge_file,
)
from tests.helpers import fingerprint

LORA = LoraConfig(rank=3, alpha=9.0)


@pytest.fixture(scope="module")
def base(model, tmp_path_factory) -> Path:
    """A copy of the model, because tests change weights of it."""
    return shutil.copytree(model, tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("float32", marks=pytest.mark.proof),
        pytest.param("bfloat16", marks=pytest.mark.full),
        "float16",
    ],
)
def lora(request, config, base) -> Config:
    made = config(dtype=request.param, model=base, checkpoint__every=2, steps=3)
    return made.model_copy(update={"lora": LORA})


@pytest.fixture(scope="module")
def run(lora, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "run"
    train_exactly(lora, path)
    return path


def test_the_ledger_is_of_the_adapters_and_the_head_binds_the_base(run, base):
    ledger = open_run(run)
    adapter = load_file(run / "checkpoints" / "step-000003" / "adapter_model.safetensors")
    assert sorted(ledger.head.names) == sorted(adapter)
    assert all(x.dtype == torch.float32 and x.any() for x in adapter.values()), "A and B moved"
    names = {k.removeprefix("frozen.") for k in ledger.head.settings if k.startswith("frozen.")}
    assert names == load_file(base / "model.safetensors").keys()
    assert (ledger.head.settings["lora.rank"], ledger.head.settings["lora.alpha"]) == (3, 9.0)
    line = ledger.lines[1]
    assert {"gradient", "optimizer", "weights", "compute_weights"} <= line.quantities.keys()
    assert all(len(line.leaves[q]) == len(adapter) for q in ("gradient", "optimizer", "weights"))
    compute = [line.quantities["compute_weights"] for line in ledger.lines]
    assert len(set(compute)) == 3, "every update changes what is computed with"


def test_the_metrics_say_what_rounding_takes(run, base, tmp_path):
    """Beside the merged folders of the checkpoints, and numpy."""
    folders = [run / "checkpoints" / f"step-{step:06}" for step in (2, 3)]
    dtype = open_run(run).head.settings["dtype"]
    for folder in folders:
        assert main(["merge", str(folder), str(tmp_path / folder.name), "--dtype", dtype]) == 0
    old, new = (load_file(tmp_path / folder.name / "model.safetensors") for folder in folders)
    adapter, whole = (
        load_file(folders[1] / "adapter_model.safetensors"),
        load_file(base / "model.safetensors"),
    )
    moved, lost, added, n = 0, 0.0, 0.0, 0
    for a_name in (name for name in adapter if name.endswith("lora_A.weight")):
        name = a_name.removeprefix("base_model.model.").replace(".lora_A", "")
        a, b = adapter[a_name].double(), adapter[a_name.replace("lora_A", "lora_B")].double()
        size, is_base = (3.0 * (b @ a)).abs(), new[name] == whole[name].to(new[name].dtype)
        moved, n = moved + count_unequal(old[name], new[name]), n + size.numel()
        lost, added = lost + float((size * is_base).sum()), added + float(size.sum())
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[2])
    assert metrics["update/moved"] == moved / n > 0
    assert metrics["lora/swallowed"] == pytest.approx(lost / added, rel=1e-4)
    assert metrics["lora/layers"].keys() == {"0", "1"}
    assert min(shares := metrics["lora/layers"].values()) <= metrics["lora/swallowed"] <= max(shares)


CUTS = [
    pytest.param(
        {"workers": 2, "micro_batch": 2, "native": NativeConfig(speculate=3)}, marks=pytest.mark.full
    ),
    {"shards_in_flight": 3, "micro_batch": 5},
    pytest.param({"recompute": "layer", "micro_batch": 1}, marks=pytest.mark.full),
]


@pytest.mark.parametrize("cut_up", CUTS, ids=str)
def test_how_the_work_is_cut_decides_no_bit(lora, run, tmp_path, cut_up):
    train(lora.model_copy(update=cut_up), tmp_path / "run")
    assert fingerprint(tmp_path / "run") == fingerprint(run)


@pytest.mark.parametrize(
    "other",
    [{"rank": 2}, {"alpha": 9.5}, {"targets": ("q_proj", "o_proj")}],
    ids=lambda other: next(iter(other)),
)
@pytest.mark.full
def test_control_another_adapter_is_another_run(lora, run, tmp_path, other):
    train(lora.model_copy(update={"lora": LORA.model_copy(update=other)}), tmp_path / "run")
    a, b = (open_run(path).lines for path in (run, tmp_path / "run"))
    assert a[0].quantities["tokens"] == b[0].quantities["tokens"], "the first adapter changes nothing"
    assert a[0].quantities["gradient"] != b[0].quantities["gradient"]


def test_off_is_the_run_without_the_section(config, base, tmp_path):
    off = config(model=base, steps=1)
    summary = train(off.model_copy(update={"lora": LoraConfig()}), tmp_path / "off")
    assert summary.fingerprint == train(off, tmp_path / "plain").fingerprint
    assert not any(key.startswith("lora") for key in open_run(tmp_path / "off").head.settings)


def test_a_run_goes_on_is_replayed_traced_and_verified(run, cut, tmp_path):
    assert faults(cut) == []
    command = ["replay", str(cut), "--step", "1", "--trace", str(tmp_path / "t.safetensors")]
    assert main(command) == 0
    names = load_file(tmp_path / "t.safetensors").keys()
    module = "base_model.model.model.layers.1.mlp.down_proj"
    assert f"gradient.{module}.lora_A.weight" in names
    assert not any("model.embed_tokens" in name for name in names)
    resume(cut, {"workers": 2, "micro_batch": 2})
    assert [line.chain for line in open_run(cut).lines] == [line.chain for line in open_run(run).lines]
    assert fingerprint(cut) == fingerprint(run)
    assert faults(cut, 0) == []


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
def test_another_base_is_refused_by_name(cut, tmp_path, name):
    assert_another_frozen_weight_is_refused(cut, tmp_path / "model", name)


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("adapter_config.json", "base_model_name_or_path", "/another/base"),
        ("adapter_config.json", "target_modules", ["q_proj"]),
        ("adapter_config.json", "auto_mapping", {"base_model_class": "X"}),
        ("trainer/config.json", "max_position_embeddings", 1 << 20),
    ],
)
def test_what_a_loader_reads_beside_the_adapter_is_bound(cut, file, field, value):
    forge_file(cut / "checkpoints" / "step-000002", file, lambda x: x.update({field: value}))
    lines = faults(cut, 0)
    assert [line.startswith("step-000002: ") for line in lines] == [True]
    named = {"base_model_name_or_path": f"the base of its adapter, which it calls {value!r}"}
    assert named.get(field, f"{file.split('/')[-1]}: {field} is {value!r}, and must be ") in lines[0]


def test_a_checkpoint_with_another_adapter_is_not_used(run, cut, capsys):
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    assert_checkpoint_is_not_used(cut, run, "adapter_model.safetensors", name, "weights", capsys)


@pytest.mark.parametrize(
    "separate",
    [
        {"max_staleness": 1},
        {"exact": False, "sampler": "hf"},
        pytest.param(
            {"exact": False, "perturb__round_weights": "float16", "perturb__delay": 1}, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_samplers_with_weights_of_their_own(config: Callable[..., Config], base, tmp_path, separate):
    """An exact run compares every bit. The other samplers get the merged weights: later tokens differ."""
    cfg = config(model=base, dtype="bfloat16", **separate).model_copy(update={"lora": LORA})
    train(cfg, tmp_path / "run")
    train(cfg.model_copy(update={"lora": LORA.model_copy(update={"alpha": 1.0})}), tmp_path / "other")
    a, b = (open_run(tmp_path / name).lines for name in ("run", "other"))
    assert a[0].quantities["sampling_logprobs"] == b[0].quantities["sampling_logprobs"]
    assert a[2].quantities["sampling_logprobs"] != b[2].quantities["sampling_logprobs"], "control"
