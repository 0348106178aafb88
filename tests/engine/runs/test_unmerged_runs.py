"""Runs whose adapters are not merged: exact, the same bits however the work is cut, resumed and verified."""

import re
from pathlib import Path

import pytest
import torch
from zerokl.engine.config.lora_section import LoraConfig
from zerokl.engine.config.run_config import Config, ParallelConfig
from zerokl.engine.config.sampling_section import NativeConfig
from zerokl.engine.runs.run import resume, train
from zerokl.engine.train.monitor import MismatchError
from zerokl.kernels.grouped_linear import grouped_linear
from zerokl.model.blocks import experts
from zerokl.model.parameters import ParameterWeights
from zerokl.verify.compare_runs import open_run

from tests.engine.runs.exact_runs import faults, train_exactly
from tests.helpers import fingerprint
from tests.random_model import EXPERTS, random_model

LORA = LoraConfig(rank=3, alpha=9.0, merge=False)
CUTS = {
    "workers": {"workers": 2, "micro_batch": 2, "native": NativeConfig(speculate=3)},
    "fsdp": {"parallel": ParallelConfig(engine="fsdp"), "recompute": "layer"},
}


@pytest.fixture(scope="module")
def base(model) -> Path:
    return model


@pytest.fixture(
    scope="module",
    params=["bfloat16", *(pytest.param(x, marks=pytest.mark.full) for x in ("float32", "float16"))],
)
def unmerged(request, config, model) -> Config:
    made = config(dtype=request.param, model=model, checkpoint__every=2, steps=3)
    return made.model_copy(update={"lora": LORA})


@pytest.fixture(scope="module")
def run(unmerged, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("unmerged") / "run"
    train_exactly(unmerged, path)
    return path


def test_the_ledger_says_it_and_every_update_changes_what_is_drawn(unmerged, run, tmp_path):
    ledger = open_run(run)
    assert ledger.head.settings["lora.merge"] is False
    assert all("compute_weights" not in line.quantities for line in ledger.lines)
    train(unmerged.model_copy(update={"lora": LORA.model_copy(update={"merge": True})}), tmp_path / "merged")
    logprobs = [line.quantities["sampling_logprobs"] for line in open_run(tmp_path / "merged").lines]
    assert logprobs[2] != ledger.lines[2].quantities["sampling_logprobs"], "control: another arithmetic"


@pytest.mark.parametrize("how", CUTS)
def test_how_the_work_is_cut_decides_no_bit(unmerged, run, tmp_path, how):
    train(unmerged.model_copy(update=CUTS[how]), tmp_path / "run")
    assert fingerprint(tmp_path / "run") == fingerprint(run)


def test_control_a_spread_model_without_its_adapters_stops_the_run(unmerged, tmp_path, monkeypatch):
    monkeypatch.setattr(ParameterWeights, "adapted", lambda self, i, fused: fused)
    with pytest.raises(MismatchError):
        train(unmerged.model_copy(update=CUTS["fsdp"]), tmp_path / "run")


def test_a_run_goes_on_and_is_verified(run, cut):
    assert faults(cut) == []
    resume(cut)
    assert [line.chain for line in open_run(cut).lines] == [line.chain for line in open_run(run).lines]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_staleness": 1}, "pool.engine, max_staleness or [perturb]"),
        ({"exact": False, "sampler": "hf"}, 'sampler ("hf")'),
        ({"exact": False, "perturb__round_weights": "float16"}, "pool.engine, max_staleness or [perturb]"),
        ({"exact": False, "precision__sampler_dtype": "float16"}, "a sampler's own precision"),
    ],
)
def test_what_computes_with_a_copy_of_the_weights_is_refused(config, model, tmp_path, settings, named):
    cfg = config(model=model, **settings).model_copy(update={"lora": LORA})
    with pytest.raises(ValueError, match=re.escape(f"lora.merge (false) with {named}")):
        train(cfg, tmp_path / "run")


@pytest.fixture(scope="module")
def mixture(config, tmp_path_factory) -> Config:
    """Two layers of experts, each with adapters of its own, and one without."""
    model = random_model(tmp_path_factory.mktemp("experts"), EXPERTS | {"num_hidden_layers": 3})
    return config(dtype="bfloat16", model=model, steps=3).model_copy(update={"lora": LORA})


@pytest.mark.parametrize("how", ["workers", pytest.param("fsdp", marks=pytest.mark.full)])
def test_adapters_of_experts_are_exact_however_the_work_is_cut(mixture, tmp_path, how):
    train_exactly(mixture, tmp_path / "run")
    train(mixture.model_copy(update=CUTS[how]), tmp_path / "cut")
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "run")


def test_control_a_sampler_without_the_adapters_of_experts_stops_the_run(mixture, tmp_path, monkeypatch):
    def bare(x, w, *others):
        return grouped_linear(x, w if torch.is_grad_enabled() else w.w, *others)

    monkeypatch.setattr(experts, "grouped_linear", bare)
    with pytest.raises(MismatchError):
        train(mixture, tmp_path / "run")
