"""Runs of each family with experts: exactly on-policy, and the same bits however the work is cut."""

from itertools import cycle
from pathlib import Path

import pytest
import torch
from zerokl.engine.config.run_config import Config, ParallelConfig
from zerokl.engine.runs.checks.verify import check_law
from zerokl.engine.runs.run import train
from zerokl.engine.train.monitor import MismatchError
from zerokl.model.blocks.experts import MixtureOfExperts
from zerokl.model.checkpoint import load_decoder

from tests.engine.runs.exact_runs import train_exactly
from tests.helpers import total_unequal
from tests.random_model import MIXTURES, random_model

DTYPES = ["float32", "bfloat16", "float16"]
SETTINGS = {
    "adapters": {"lora__rank": 3},
    "quantised": {"precision__weights": "float8_e4m3fn/block32"},
    "replayed and balanced": {"perturb__routing": "replayed", "loss__router_aux_coef": 0.1},
    "recomputed": {"recompute": "layer", "precision__router_dtype": "float32"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {name: random_model(tmp_path_factory.mktemp(name), widths) for name, widths in MIXTURES.items()}


def exact_run(config: Config, path: Path) -> str:
    """The fingerprint of a run that must be exactly on-policy."""
    summary = train_exactly(config, path)
    return summary.fingerprint


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", MIXTURES)
def test_a_run_is_exact_however_it_is_cut_and_trains_every_weight(config, models, tmp_path, family, dtype):
    settings = config(model=models[family], dtype=dtype, checkpoint__every=3)
    first = exact_run(settings, tmp_path / "run")
    cut_up = {"workers": 2, "micro_batch": 2, "shards_in_flight": 3}
    assert exact_run(settings.model_copy(update=cut_up), tmp_path / "cut") == first
    before, after = (
        load_decoder(folder, torch.float32)
        for folder in (models[family], tmp_path / "run/checkpoints/step-000003")
    )
    old, new = (decoder.layout.checkpoint_views(decoder.flat.detach()) for decoder in (before, after))
    frozen = {part for name in before.layout.frozen for part, _ in before.layout.entries[name].parts}
    assert {name for name in old if torch.equal(old[name], new[name])} == frozen


@pytest.mark.full
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_exact_however_the_work_is_cut(config, models, tmp_path, family, setting):
    settings = config(model=models[family], dtype="bfloat16", **SETTINGS[setting])
    first = exact_run(settings, tmp_path / "run")
    assert exact_run(settings.model_copy(update={"workers": 2, "micro_batch": 3}), tmp_path / "cut") == first


@pytest.mark.full
@pytest.mark.parametrize("family", MIXTURES)
def test_sharded_weights_decide_no_bit(config, models, tmp_path, family):
    plain = config(model=models[family], dtype="bfloat16", steps=2, checkpoint__every=2)
    first = exact_run(plain, tmp_path / "run")
    sharded = plain.model_copy(update={"parallel": ParallelConfig(engine="fsdp")})
    assert exact_run(sharded, tmp_path / "sharded") == first
    whole, joined = (
        load_decoder(tmp_path / name / "checkpoints/step-000002", torch.float32).flat.detach()
        for name in ("run", "sharded")
    )
    assert total_unequal([whole], [joined]) == 0


@pytest.mark.full
@pytest.mark.parametrize(("family", "dtype"), list(zip(MIXTURES, cycle(DTYPES), strict=False)))
def test_the_laws_checks_hold(models, family, dtype):
    """zerokl verify MODEL: order, padding, chunks, decode, threads, concurrency and micro-batches.

    Each family in one dtype: the runs above have all.
    """
    checks = check_law(str(models[family]), [dtype], sequences=4, longest=24)
    assert len(checks) >= 8
    assert [check for check in checks if check.unequal or not check.comparisons] == []


def test_control_another_sum_on_one_side_stops_the_run(config, models, tmp_path, monkeypatch):
    """Where a sampler draws, the sum of the chosen experts is one unit of bf16 larger."""
    with_shared = MixtureOfExperts._with_shared

    def planted(self, y, *args):
        return with_shared(self, y if torch.is_grad_enabled() else y * (1.0 + 2.0**-8), *args)

    monkeypatch.setattr(MixtureOfExperts, "_with_shared", planted)
    with pytest.raises(MismatchError):
        train(config(model=models["qwen2_moe"], dtype="bfloat16"), tmp_path / "run")
