"""Whole runs whose ranks share experts: any number of ranks has the ledger of one process."""

from pathlib import Path

import pytest
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.memory import layout_of_a_rank
from zerokl.engine.runs.run import train
from zerokl.engine.train.parallel.expert import ExpertParts
from zerokl.engine.train.parallel.process_group import Ranks
from zerokl.model.config import ModelConfig
from zerokl.model.families import MODEL_TYPES
from zerokl.model.weights import Layout

from tests.engine.runs.exact_runs import train_with_gradients
from tests.engine.train.parallel.test_ranks import (
    _goes_on_with_other_ranks,
    _run,
    _same,
    _same_metrics,
)
from tests.engine.train.parallel.test_tensor_parts import ranks_of
from tests.random_model import EXPERTS, MIXTURES, TWO_LAYERS, random_model

ROUTERS = {"softmax": EXPERTS | {"num_experts": 8}, "sigmoid": MIXTURES["glm4_moe"]}
PLAINS = [
    ("softmax", "bfloat16"),
    pytest.param(("sigmoid", "float16"), marks=pytest.mark.full),
    *(
        pytest.param((router, dtype), marks=pytest.mark.proof)
        for router, dtype in (
            ("softmax", "float32"),
            ("softmax", "float16"),
            ("sigmoid", "float32"),
            ("sigmoid", "bfloat16"),
        )
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("experts")
    return {name: random_model(root / name, widths, 1.5) for name, widths in ROUTERS.items()}


@pytest.fixture(scope="module", params=PLAINS, ids="-".join)
def plain(request, config, models) -> Config:
    router, dtype = request.param
    return config(model=models[router], dtype=dtype, steps=2, evaluation__every=1, loss__router_aux_coef=0.01)


@pytest.fixture(scope="module")
def alone(plain, tmp_path_factory) -> Path:
    return train_with_gradients(plain, tmp_path_factory.mktemp("alone") / "run")


GRIDS = [(2, 2), *(pytest.param(*grid, marks=pytest.mark.proof) for grid in ((4, 4), (4, 2), (8, 4)))]


@pytest.mark.parametrize(("ranks", "expert"), GRIDS)
def test_any_grid_of_ranks_has_one_ledger(plain, alone, tmp_path, ranks, expert):
    _run(ranks, plain, tmp_path / "run", "--parallel.expert", str(expert))
    _same(tmp_path / "run", alone)
    _same_metrics(tmp_path / "run", alone)


def _widths(family: str) -> dict:
    return TWO_LAYERS | {"model_type": family} | dict(MODEL_TYPES[family].small)


FAMILIES = {
    "biases, sinks": MIXTURES["gpt_oss"],
    "a shared expert with a gate, reference, critic": MIXTURES["qwen2_moe"],
    "latent attention, filters": _widths("deepseek_v3"),
    "gated delta nets, muon": _widths("qwen3_next"),
    "frozen experts, recompute, updates, guesses": ROUTERS["softmax"],
}
WORKS = {
    "a shared expert with a gate, reference, critic": {"loss__preset": "ppo", "loss__kl_coef": 0.1},
    "latent attention, filters": {"sampling__top_p": 0.9, "sampling__temperature": 0.7},
    "gated delta nets, muon": {"optimizer__name": "muon", "optimizer__weight_decay": 0.1},
    "frozen experts, recompute, updates, guesses": {
        "frozen": ("model.layers.1.mlp.experts.*.gate_proj.*", "model.layers.1.mlp.experts.*.up_proj.*"),
        "recompute": "layer",
        "updates_per_rollout": 2,
        "native__speculate": 3,
        "micro_batch": 2,
    },
}


@pytest.mark.proof
@pytest.mark.parametrize("case", FAMILIES)
def test_what_works_has_one_ledger(config, tmp_path, case):
    model = random_model(tmp_path, FAMILIES[case], 1.5)
    plain = config(model=model, dtype="bfloat16", **{"steps": 2} | WORKS.get(case, {}))
    assert train(plain, tmp_path / "alone").tokens_unequal == 0
    _run(2, plain, tmp_path / "run", "--parallel.expert", "2")
    _same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.full
def test_a_run_goes_on_with_another_number_of_ranks(config, models, tmp_path):
    plain = config(model=models["sigmoid"], steps=3, dtype="bfloat16", checkpoint__every=1)
    _goes_on_with_other_ranks(plain, tmp_path, "parallel.expert", [(4, 2), (4, 4)])


REFUSED = {
    "fsdp": {"parallel__engine": "fsdp"},
    "shared layers": {"parallel__tensor": 2, "precision__leaves": 2},
    "shared rows": {"parallel__context": 2},
    "adapters": {"lora__rank": 2},
    "quantised weights": {"precision__weights": "int8/row"},
    "moments in 8 bits": {"optimizer__moments": "int8"},
    "older weights": {"max_staleness": 1},
    "workers": {"workers": 2},
    "vllm-zerokl": {"sampler": "vllm-zerokl"},
    "hf": {"sampler": "hf", "exact": False},
    "one process": {},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_work_is_refused_in_one_line(config, models, tmp_path, case):
    settings = {"model": models["softmax"], "steps": 1, "parallel__expert": 2} | REFUSED[case]
    with pytest.raises(ValueError, match=r"^config: parallel.expert \(2\) with ") as error:
        train(config(**settings), tmp_path / "run")
    assert "\n" not in str(error.value)


def test_the_memory_of_a_rank_is_predicted_with_its_experts_alone(config, models):
    layout = Layout(ModelConfig.from_file(models["softmax"]))
    part = layout_of_a_rank(config(parallel__expert=4), layout)
    for name, entry in layout.entries.items():
        assert part.entries[name].numel * (4 if ".experts." in name else 1) == entry.numel
    assert layout_of_a_rank(config(), layout) is layout


@pytest.mark.parametrize(
    ("family", "expert", "message"),
    [("qwen3", 2, "a Qwen3ForCausalLM has no experts"), ("qwen3_moe", 4, "must divide the experts")],
)
def test_ranks_that_do_not_divide_the_experts_are_refused(tmp_path, family, expert, message):
    widths = EXPERTS if family == "qwen3_moe" else TWO_LAYERS
    layout = Layout(ModelConfig.from_file(random_model(tmp_path, widths)))
    grid = {"dp": ranks_of(0, 1), "ep": ranks_of(0, expert)}
    with pytest.raises(ValueError, match=rf"^parallel.expert \({expert}\):? {message}"):
        ExpertParts(layout, Ranks(ranks_of(0, expert).mesh, grid))
