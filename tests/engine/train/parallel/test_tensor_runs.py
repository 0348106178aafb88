"""Whole runs whose ranks share each layer: any number of ranks has the ledger of one process."""

from pathlib import Path

import pytest
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.run import resume, train
from zerokl.model.families import MODEL_TYPES

from tests.engine.runs.exact_runs import forget_end, train_with_gradients
from tests.engine.runs.test_leaf_runs import EIGHT_HEADS
from tests.engine.train.parallel.test_ranks import (
    _goes_on_with_other_ranks,
    _run,
    _same,
    _same_metrics,
)
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
    return train_with_gradients(plain, tmp_path_factory.mktemp("alone") / "run")


GRIDS = [(2, 2), *(pytest.param(*grid, marks=pytest.mark.proof) for grid in ((4, 4), (8, 8), (4, 2), (8, 2)))]


@pytest.mark.parametrize(("ranks", "tensor"), GRIDS)
def test_any_grid_of_ranks_has_one_ledger(plain, alone, tmp_path, ranks, tensor):
    _run(ranks, plain, tmp_path / "run", "--parallel.tensor", str(tensor))
    _same(tmp_path / "run", alone)
    _same_metrics(tmp_path / "run", alone)


WORKS = {
    "reference, critic": {"loss__preset": "ppo", "loss__kl_coef": 0.1},
    "filters": {"sampling__top_p": 0.9, "sampling__temperature": 0.7, "dtype": "bfloat16"},
    "recompute, updates, guesses": {
        "recompute": "layer",
        "updates_per_rollout": 2,
        "native__speculate": 3,
        "dtype": "float16",
    },
    "muon": {"optimizer__name": "muon", "optimizer__weight_decay": 0.1, "dtype": "bfloat16"},
    "turns": {"task__name": "nim", "task__options": {}, "task__reward": "", "prompts": 4},
    "windows": {"dtype": "bfloat16"},
    "tied, biases": {"dtype": "bfloat16"},
    "frozen": {"frozen": ("model.layers.0.*", "*.norm.*"), "dtype": "bfloat16"},
    "adapters, filters": {"lora__rank": 3, "sampling__top_p": 0.9, "dtype": "bfloat16"},
    "adapters of some matrices, updates, reference": {
        "lora__rank": 2,
        "lora__targets": ("k_proj", "o_proj", "up_proj"),
        "loss__kl_coef": 0.1,
        "updates_per_rollout": 2,
        "dtype": "float16",
        "recompute": "layer",
    },
    "adapters of fused matrices": {"lora__rank": 2},
    "adapters of rounded weights, not merged": {
        "lora__rank": 3,
        "lora__merge": False,
        "dtype": "bfloat16",
        "steps": 3,
    },
    "frozen, in place": {"frozen": ("model.embed_tokens.*", "*.down_proj.*"), "checkpoint__every": 1},
}
MODELS = {
    "adapters of fused matrices": {"model_type": "phi3"} | dict(MODEL_TYPES["phi3"].small),
    "windows": {"model_type": "gemma2"} | dict(MODEL_TYPES["gemma2"].small),
    "tied, biases": {"model_type": "qwen2", "tie_word_embeddings": True} | dict(MODEL_TYPES["qwen2"].small),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, marks=pytest.mark.proof if x.startswith("adapters of") else pytest.mark.full)
        for x in WORKS
    ],
)
def test_what_works_has_one_ledger(config, eight, tmp_path, case):
    model = random_model(tmp_path, EIGHT_HEADS | MODELS[case], 1.5) if case in MODELS else eight
    plain = config(model=model, precision__leaves=4, **{"steps": 2} | WORKS[case])
    assert train(plain, tmp_path / "alone").tokens_unequal == 0
    _run(2, plain, tmp_path / "run", "--parallel.tensor", "2")
    _same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.proof
@pytest.mark.parametrize("merge", [True, False])
def test_a_run_of_adapters_goes_on_with_another_number_of_ranks(config, eight, tmp_path, merge):
    lora = {"lora__rank": 3, "lora__merge": merge, "precision__leaves": 8}
    plain = config(model=eight, steps=3, dtype="bfloat16", checkpoint__every=1, **lora)
    train(plain, tmp_path / "alone")
    _run(4, plain, tmp_path / "run", "--parallel.tensor", "4")
    _same(tmp_path / "run", tmp_path / "alone")
    _same_metrics(tmp_path / "run", tmp_path / "alone")
    forget_end(tmp_path / "run")
    resume(tmp_path / "run", {"parallel.tensor": "1"})
    _same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.full
def test_a_run_goes_on_with_another_number_of_ranks(config, eight, tmp_path):
    plain = config(model=eight, steps=3, dtype="bfloat16", precision__leaves=4, checkpoint__every=1)
    _goes_on_with_other_ranks(plain, tmp_path, "parallel.tensor", [(2, 2), (4, 4)])


REFUSED = {
    "leaves": {"precision__leaves": 1},
    "vllm-exact": {"sampler": "vllm-exact"},
    "hf": {"sampler": "hf", "exact": False},
    "one process": {},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_work_is_refused_in_one_line(config, eight, tmp_path, case):
    settings = {"precision__leaves": 2, "parallel__tensor": 2} | REFUSED[case]
    with pytest.raises(ValueError, match=r"^config: (parallel.tensor|precision.leaves) \(") as error:
        train(config(model=eight, steps=1, **settings), tmp_path / "run")
    assert "\n" not in str(error.value)
