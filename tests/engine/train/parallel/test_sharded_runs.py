"""Whole runs with weights that FSDP shards: each part of a run has the bits of the run with whole weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.config.run_config import Config, ParallelConfig
from zerokl.engine.runs.run import resume, train
from zerokl.engine.train.parallel.gathered import FrozenPieces
from zerokl.engine.train.parallel.sharded_adapters import ShardedAdapters

from tests.engine.runs.exact_runs import forget_end
from tests.engine.train.parallel.test_ranks import _launch
from tests.random_model import EXPERTS, TWO_LAYERS, random_model

FROZEN = {"frozen": ("model.layers.1.*", "model.norm.*")}
CRITIC = {"loss__preset": "ppo", "optimizer__critic_lr_ratio": 3.0}
BALANCED = {"loss__router_aux_coef": 0.01, "precision__router_dtype": "float32", "recompute": "layer"}
LORA = {"lora__rank": 3}
MUON = {"optimizer__name": "muon", "optimizer__weight_decay": 0.1}
# The settings of each part of a run; True where the model has experts, and where there is a reference.
CASES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "reference": ({}, False, True),
    "reference in the reward": ({"loss__kl_in": "reward"}, False, True),
    "frozen": (FROZEN, False, False),
    "frozen first": ({"frozen": ("model.embed_tokens.*", "model.layers.0.*")}, False, False),
    "critic": (CRITIC, False, False),
    "muon": (MUON | FROZEN | CRITIC, True, False),
    "adapters": (LORA, False, True),
    "adapters beside": (LORA | {"lora__merge": False, "recompute": "layer"}, False, True),
    "experts": ({}, True, False),
    "balanced experts": (BALANCED, True, False),
    "adapters of experts": (LORA | {"recompute": "layer"}, True, True),
    "all": (FROZEN | CRITIC, False, True),
    "all with experts": (FROZEN | CRITIC | BALANCED, True, True),
}
Make = Callable[..., Config]

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def make(config, tmp_path_factory) -> Make:
    """make(case, dtype): a run of two steps. The reference is another model: its KL term has a gradient."""
    sparse = EXPERTS | {"num_hidden_layers": 3}
    widths = {"reference": TWO_LAYERS, "experts": sparse}
    models = {name: random_model(tmp_path_factory.mktemp(name), w, 1.5) for name, w in widths.items()}

    def made(case: str, dtype: str) -> Config:
        settings, has_experts, has_reference = CASES[case]
        settings = dict(settings)
        if has_experts:
            settings["model"] = models["experts"]
        if has_reference:
            settings |= {"loss__kl_coef": 0.1, "loss__ref_model": str(models["reference"])}
        return config(steps=2, dtype=dtype, checkpoint__every=1, tracking=[], **settings)

    return made


def sharded(plain: Config) -> Config:
    return plain.model_copy(update={"parallel": ParallelConfig(engine="fsdp")})


def differences(path: Path, alone: Path) -> list[str]:
    """What of weights, moments, rollouts, ledger and metrics is not that of the other run."""
    a, b = (json.loads((p / "summary.json").read_text()) for p in (path, alone))
    different = [name for name in ("fingerprint", "weights") if a[name] != b[name]]
    lines = [[json.loads(line) for line in (p / "ledger.jsonl").open()] for p in (path, alone)]
    steps, wanted = ([line for line in run_lines if line["kind"] == "step"] for run_lines in lines)
    for one, other in zip(steps, wanted, strict=True):
        q, r = dict(one["quantities"]), dict(other["quantities"])
        different += [f"{one['step']}: {name}" for name in q.keys() | r.keys() if q.get(name) != r.get(name)]
    if steps != wanted or (path / "rollouts.jsonl").read_bytes() != (alone / "rollouts.jsonl").read_bytes():
        different.append("ledger or rollouts")
    metrics = [[json.loads(line) for line in (p / "metrics.jsonl").open()] for p in (path, alone)]
    for m, n in zip(*metrics, strict=True):
        names = [name for name in m.keys() | n.keys() if not name.startswith(("time/", "perf/"))]
        different += [name for name in names if m.get(name) != n.get(name)]
    return different


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_whole_weights(make, tmp_path, case, dtype):
    plain = make(case, dtype)
    train(plain, tmp_path / "alone")
    train(sharded(plain), tmp_path / "run")
    assert differences(tmp_path / "run", tmp_path / "alone") == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_all_parts_together_go_on_over_other_ranks(make, tmp_path, case, dtype):
    """Two ranks; then one goes on from their checkpoint, with each engine."""
    plain = make(case, dtype)
    train(plain, tmp_path / "alone")
    (tmp_path / "config.toml").write_text(to_toml(sharded(plain)))
    process = _launch(2, ["config.toml", "--run_dir", "run"], tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert differences(tmp_path / "run", tmp_path / "alone") == []
    for engine in ("fsdp", "replicated"):
        run = shutil.copytree(tmp_path / "run", tmp_path / engine)
        forget_end(run)
        resume(run, {"parallel.engine": engine})
        assert differences(run, tmp_path / "alone") == [], engine


def test_a_stale_merge_and_a_bit_of_the_reference_are_seen(make, tmp_path, monkeypatch):
    """The controls: what is planted shows in the ledger and in the metrics."""
    plain = make("adapters", "float32")
    train(plain, tmp_path / "alone")
    with monkeypatch.context() as patch:
        gather_into = FrozenPieces.gather_into

        def one_bit_off(self, flat):
            gather_into(self, flat)
            flat.view(-1)[0] *= 1.5

        patch.setattr(FrozenPieces, "gather_into", one_bit_off)
        train(sharded(plain), tmp_path / "reference")
    assert "ref/k1" in differences(tmp_path / "reference", tmp_path / "alone")
    with monkeypatch.context() as patch:
        patch.setattr(ShardedAdapters, "merge", lambda self: None)
        train(sharded(plain), tmp_path / "merge")
    assert "0: compute_weights" in differences(tmp_path / "merge", tmp_path / "alone")
