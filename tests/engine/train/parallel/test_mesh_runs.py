"""Whole runs over a grid (dp, cp, tp): any grid has the ledger of one process with the same leaves."""

from pathlib import Path

import pytest
from zerokl.engine.config.run_config import Config

from tests.engine.runs.exact_runs import train_with_gradients
from tests.engine.runs.test_leaf_runs import EIGHT_HEADS
from tests.engine.train.parallel.test_ranks import _run, _same, _same_metrics
from tests.engine.train.parallel.test_tensor_runs import DTYPES
from tests.random_model import random_model

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


@pytest.mark.parametrize(("ranks", "tensor", "context"), [(4, 2, 2), (8, 2, 2)])
def test_any_grid_has_one_ledger(plain, alone, tmp_path, ranks, tensor, context):
    _run(ranks, plain, tmp_path / "run", *words(tensor, context))
    _same(tmp_path / "run", alone)
    _same_metrics(tmp_path / "run", alone)


@pytest.mark.parametrize(("ranks", "tensor", "context"), [(4, 2, 1), (4, 1, 2), (8, 2, 2)])
def test_spread_weights_on_any_grid_have_one_ledger(plain, alone, tmp_path, ranks, tensor, context):
    _run(ranks, plain, tmp_path / "run", *words(tensor, context, "fsdp"))
    _same(tmp_path / "run", alone)
    _same_metrics(tmp_path / "run", alone)
