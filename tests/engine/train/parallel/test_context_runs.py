"""Whole runs whose ranks share the rows of each forward: any number of ranks has the ledger of one process."""

import json
from pathlib import Path

import pytest
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.run import train

from tests.engine.train.parallel.test_ranks import _run, _same, _same_metrics
from tests.random_model import TWO_LAYERS, random_model

FOUR_HEADS = TWO_LAYERS | {"num_attention_heads": 8, "num_key_value_heads": 4}
DTYPES = [
    "bfloat16",
    pytest.param("float32", marks=pytest.mark.proof),
    pytest.param("float16", marks=pytest.mark.proof),
]


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("context"), FOUR_HEADS, 1.5)


@pytest.fixture(scope="module", params=DTYPES)
def plain(request, config, four) -> Config:
    return config(model=four, dtype=request.param, steps=2, evaluation__every=1)


@pytest.fixture(scope="module")
def alone(plain, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("alone") / "run"
    summary = train(plain, path)
    assert summary.tokens_unequal == 0
    assert all(json.loads(line)["grad_norm"] > 0 for line in (path / "metrics.jsonl").open())
    return path


GRIDS = [(2, 2), *(pytest.param(*grid, marks=pytest.mark.proof) for grid in ((4, 4), (4, 2), (8, 4)))]


@pytest.mark.parametrize(("ranks", "context"), GRIDS)
def test_any_grid_of_ranks_has_one_ledger(plain, alone, tmp_path, ranks, context):
    _run(ranks, plain, tmp_path / "run", "--parallel.context", str(context))
    _same(tmp_path / "run", alone)
    _same_metrics(tmp_path / "run", alone)
