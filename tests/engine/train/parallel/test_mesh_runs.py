"""Whole runs over a grid (dp, cp, tp): any grid has the ledger of one process with the same leaves."""

import subprocess
import time
from pathlib import Path

import pytest
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.run import resume, train
from zerokl.model.families import MODEL_TYPES

from tests.engine.runs.exact_runs import train_with_gradients
from tests.engine.runs.test_leaf_runs import EIGHT_HEADS
from tests.engine.train.parallel.test_ranks import _launch, _run, _same, _same_metrics
from tests.engine.train.parallel.test_tensor_runs import DTYPES
from tests.random_model import random_model

QWEN2 = EIGHT_HEADS | {"model_type": "qwen2", "tie_word_embeddings": True} | dict(MODEL_TYPES["qwen2"].small)
LONGER = {"sampling__max_tokens": 32, "prompts": 4, "num_generations": 4, "virtual_shards": 4}


@pytest.fixture(scope="module")
def eight(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("mesh"), EIGHT_HEADS, 1.5)


@pytest.fixture(scope="module", params=DTYPES)
def plain(request, config, eight) -> Config:
    settings = {"dtype": request.param, "steps": 2, "precision__leaves": 8, "evaluation__every": 1}
    return config(model=eight, **settings, **LONGER)


@pytest.fixture(scope="module")
def alone(plain, tmp_path_factory) -> Path:
    return train_with_gradients(plain, tmp_path_factory.mktemp("alone") / "run")


def words(tensor: int, context: int, engine: str = "replicated") -> list[str]:
    settings = {"tensor": tensor, "context": context, "engine": engine}
    return [f"--parallel.{name}={value}" for name, value in settings.items()]


PROOF = pytest.mark.proof
GRIDS = [
    pytest.param(4, 2, 2, marks=pytest.mark.full),
    *(pytest.param(*grid, marks=PROOF) for grid in ((8, 2, 2), (8, 4, 2), (8, 2, 4))),
]


@pytest.mark.parametrize(("ranks", "tensor", "context"), GRIDS)
def test_any_grid_has_one_ledger(plain, alone, tmp_path, ranks, tensor, context):
    _run(ranks, plain, tmp_path / "run", *words(tensor, context))
    _same(tmp_path / "run", alone)
    _same_metrics(tmp_path / "run", alone)


SPREAD = [
    pytest.param(4, 2, 2, marks=pytest.mark.full),
    *(pytest.param(*grid, marks=PROOF) for grid in ((4, 2, 1), (4, 1, 2), (8, 2, 2), (8, 1, 4), (8, 8, 1))),
]


@pytest.mark.parametrize(("ranks", "tensor", "context"), SPREAD)
def test_spread_weights_on_any_grid_have_one_ledger(plain, alone, tmp_path, ranks, tensor, context):
    _run(ranks, plain, tmp_path / "run", *words(tensor, context, "fsdp"))
    _same(tmp_path / "run", alone)
    _same_metrics(tmp_path / "run", alone)


WORKS = {
    "critic, reference": {"loss__preset": "ppo", "loss__kl_coef": 0.1},
    "filters, updates, recompute": {
        "sampling__top_p": 0.9,
        "sampling__temperature": 0.7,
        "updates_per_rollout": 2,
        "recompute": "layer",
        "dtype": "float16",
    },
    "muon, narrow moments": {
        "optimizer__name": "muon",
        "optimizer__moments": "bfloat16",
        "optimizer__weight_decay": 0.1,
    },
    "tied, biases": {},
    "frozen": {"frozen": ("model.layers.0.*", "*.norm.*", "model.embed_tokens.*")},
    "turns": {"task__name": "nim", "task__options": {}, "task__reward": "", "prompts": 4},
    "adapters": {"lora__rank": 4},
    "adapters that are not merged": {"lora__rank": 2, "lora__merge": False, "loss__kl_coef": 0.1},
}


CASES = [(case, "replicated") for case in WORKS]
CASES += [(case, "fsdp") for case in WORKS if not case.startswith("adapters")]


@pytest.mark.proof
@pytest.mark.parametrize(("case", "engine"), CASES)
def test_what_works_has_one_ledger(config, eight, tmp_path, case, engine):
    model = eight
    if case == "tied, biases":
        model = random_model(tmp_path, QWEN2, 1.5)
    common = {"model": model, "steps": 2, "dtype": "bfloat16", "precision__leaves": 4}
    plain = config(**common | WORKS[case])
    assert train(plain, tmp_path / "alone").tokens_unequal == 0
    _run(4, plain, tmp_path / "run", *words(2, 2, engine))
    _same(tmp_path / "run", tmp_path / "alone")
    _same_metrics(tmp_path / "run", tmp_path / "alone")


# Each run is killed after the checkpoint of its second step, and goes on with the next mesh.
MESHES = [(4, "fsdp", 2, 2), (4, "fsdp", 1, 2), (2, "fsdp", 2, 1), (4, "replicated", 2, 2), (2, "fsdp", 1, 1)]


@pytest.mark.proof
def test_a_killed_run_goes_on_with_any_mesh(config, eight, tmp_path):
    more = {"loss__preset": "ppo", "frozen": ("model.layers.0.*",), "checkpoint__every": 1}
    plain = config(model=eight, steps=len(MESHES) + 1, dtype="bfloat16", precision__leaves=4, **more)
    train(plain, tmp_path / "alone")
    for step, (ranks, engine, tensor, context) in enumerate(MESHES, 1):
        settings = words(tensor, context, engine)
        if step == 1:
            (tmp_path / "config.toml").write_text(to_toml(plain))
            process = _launch(ranks, ["config.toml", "--run_dir", "run", *settings], tmp_path)
        else:
            process = _launch(ranks, ["--resume", "run", *settings], tmp_path)
        _kill_after(process, tmp_path / f"run/checkpoints/step-{step:06d}")
    resume(
        tmp_path / "run", {"parallel.tensor": "1", "parallel.context": "1", "parallel.engine": "replicated"}
    )
    _same(tmp_path / "run", tmp_path / "alone")
    _same_metrics(tmp_path / "run", tmp_path / "alone")


def _kill_after(process: subprocess.Popen, checkpoint: Path) -> None:
    while process.poll() is None and not checkpoint.exists():
        time.sleep(0.01)
    process.kill()
    output, _ = process.communicate()
    assert checkpoint.exists(), output
