"""Whole runs whose ranks share rows: any number of ranks has the ledger of one process."""

from pathlib import Path

import pytest
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.run import resume, train

from tests.engine.runs.exact_runs import forget_end, train_with_gradients
from tests.engine.train.parallel.test_ranks import _run, _same, _same_metrics
from tests.engine.train.parallel.test_shared_rows import FOUR_HEADS
from tests.engine.train.parallel.test_tensor_runs import DTYPES
from tests.random_model import random_model


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("context"), FOUR_HEADS, 1.5)


@pytest.fixture(scope="module", params=DTYPES)
def plain(request, config, four) -> Config:
    longer = {"sampling__max_tokens": 32, "prompts": 4, "num_generations": 4, "virtual_shards": 2}
    return config(model=four, dtype=request.param, steps=2, evaluation__every=1, **longer)


@pytest.fixture(scope="module")
def alone(plain, tmp_path_factory) -> Path:
    return train_with_gradients(plain, tmp_path_factory.mktemp("alone") / "run")


GRIDS = [
    pytest.param(2, 2, marks=pytest.mark.full),
    *(pytest.param(*grid, marks=pytest.mark.proof) for grid in ((4, 4), (4, 2), (8, 4))),
]


@pytest.mark.parametrize(("ranks", "context"), GRIDS)
def test_any_grid_of_ranks_has_one_ledger(plain, alone, tmp_path, ranks, context):
    _run(ranks, plain, tmp_path / "run", "--parallel.context", str(context))
    _same(tmp_path / "run", alone)
    _same_metrics(tmp_path / "run", alone)


WORKS = {
    "reference, recompute": {"loss__kl_coef": 0.1, "recompute": "layer"},
    "filters, updates, guesses": {
        "sampling__top_p": 0.9,
        "sampling__temperature": 0.7,
        "updates_per_rollout": 2,
        "native__speculate": 3,
    },
    "turns": {"task__name": "nim", "task__options": {}, "task__reward": "", "prompts": 4},
    "adapters": {"lora__rank": 4},
    "adapters that are not merged": {
        "lora__rank": 2,
        "lora__merge": False,
        "lora__targets": ("k_proj", "o_proj"),
    },
    "frozen": {"frozen": ("model.layers.0.*", "*.norm.*")},
    "fp32 logits, rounded keys": {"precision__head_dtype": "float32", "precision__kv": "int8/token"},
    "critic, reference": {"loss__preset": "ppo", "loss__kl_coef": 0.1},
    "quantised weights, moments in 8 bits": {
        "precision__weights": "int8/row",
        "optimizer__moments": "int8",
        "virtual_shards": 4,
        "shards_in_flight": 2,
    },
    "state beside memory": {"memory__offload": "disk"},
    "older weights": {"max_staleness": 1, "staleness_schedule": "lagged", "steps": 3},
    "another dtype in the sampler, gradient audit": {
        "precision__sampler_dtype": "float32",
        "monitor__gradient": 1,
        "exact": False,
    },
    "chunks of keys": {"precision__attention": "chunked-512"},
    "muon": {"optimizer__name": "muon", "optimizer__moments": "bfloat16", "optimizer__weight_decay": 0.1},
}


IN_FULL = ("reference, recompute", "adapters")


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.full if x in IN_FULL else pytest.mark.proof) for x in WORKS]
)
def test_what_works_has_one_ledger(config, four, tmp_path, case):
    plain = config(model=four, **{"steps": 2, "dtype": "bfloat16"} | WORKS[case])
    assert (train(plain, tmp_path / "alone").tokens_unequal == 0) == plain.exact
    _run(2, plain, tmp_path / "run", "--parallel.context", "2")
    _same(tmp_path / "run", tmp_path / "alone")
    _same_metrics(tmp_path / "run", tmp_path / "alone")


@pytest.mark.proof
def test_a_run_goes_on_with_another_number_of_ranks(config, four, tmp_path):
    plain = config(model=four, steps=3, dtype="bfloat16", checkpoint__every=1)
    train(plain, tmp_path / "alone")
    _run(2, plain, tmp_path / "run", "--parallel.context", "2")
    forget_end(tmp_path / "run")
    resume(tmp_path / "run", {"parallel.context": "1"})
    _same(tmp_path / "run", tmp_path / "alone")


def test_one_process_has_nobody_to_share_rows_with(config, four, tmp_path):
    with pytest.raises(ValueError, match=r"^config: parallel.context \(2\) with 1 ranks: start ") as error:
        train(config(model=four, steps=1, parallel__context=2), tmp_path / "run")
    assert "\n" not in str(error.value)
