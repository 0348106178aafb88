"""Whole runs whose ranks share each layer: any number of ranks has the ledger of one process."""

import json
from pathlib import Path

import pytest
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.run import train

from tests.engine.runs.test_leaf_runs import EIGHT_HEADS
from tests.engine.train.parallel.test_ranks import _run, _same, _same_metrics
from tests.random_model import random_model

DTYPES = [
    "bfloat16",
    pytest.param("float32", marks=pytest.mark.proof),
    pytest.param("float16", marks=pytest.mark.proof),
]


@pytest.fixture(scope="module")
def eight(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("shared"), EIGHT_HEADS, 1.5)


@pytest.fixture(scope="module", params=DTYPES)
def plain(request, config, eight) -> Config:
    return config(model=eight, dtype=request.param, steps=2, precision__leaves=8, evaluation__every=1)


@pytest.fixture(scope="module")
def alone(plain, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("alone") / "run"
    summary = train(plain, path)
    assert summary.tokens_unequal == 0
    assert all(json.loads(line)["grad_norm"] > 0 for line in (path / "metrics.jsonl").open())
    return path


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.proof), pytest.param(8, marks=pytest.mark.proof)]
)
def test_any_number_of_ranks_has_one_ledger(plain, alone, tmp_path, ranks):
    _run(ranks, plain, tmp_path / "run", "--parallel.tensor", str(ranks))
    _same(tmp_path / "run", alone)
    _same_metrics(tmp_path / "run", alone)
