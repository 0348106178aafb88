"""Ledger and weights of a run depend on seed and mathematical settings, not on how the work is cut up."""

import pytest
from zerokl.engine.runs.run import Summary, train
from zerokl.kernels import backend
from zerokl.kernels.cpp import library

from tests.engine.runs.exact_runs import train_exactly

# Settings that change only how the same work is done.
FREE = [
    {"micro_batch": 1},
    pytest.param({"micro_batch": 3}, marks=pytest.mark.full),
    pytest.param({"micro_batch": 64}, marks=pytest.mark.full),
    {"native__max_concurrency": 1},
    {"shards_in_flight": 3, "micro_batch": 5, "workers": 1},
    {"recompute": "layer"},
    {"memory__offload": "host"},
    {"memory__offload": "disk", "recompute": "layer", "workers": 2},
    {"native__max_concurrency": 7, "native__max_batch_tokens": 5},
    {"native__speculate": 3},
    pytest.param({"threads": 1}, marks=pytest.mark.full),
    {"threads": 2},
    {"workers": 2},
    pytest.param({"workers": 4}, marks=pytest.mark.full),
    {"ledger__detail": "roots", "checkpoint__every": 1, "evaluation__every": 1},
]
# Settings that change a number that is added, or the order of a sum.
BINDING = [{"seed": 1}, {"virtual_shards": 1}, {"optimizer__lr": 2e-2}, {"sampling__temperature": 0.7}]


def _name(overrides: dict) -> str:
    return " ".join(f"{k}={v}" for k, v in overrides.items())


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.proof), "float16"]
)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def base(config, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Summary:
    summary = train_exactly(config(dtype=dtype), tmp_path_factory.mktemp("runs") / "base")
    return summary


@pytest.mark.parametrize("overrides", FREE, ids=_name)
def test_fingerprint_does_not_depend_on_how_the_work_is_cut(config, dtype, base, tmp_path, overrides):
    summary = train(config(dtype=dtype, **overrides), tmp_path / "run")
    assert (summary.fingerprint, summary.weights) == (base.fingerprint, base.weights)


@pytest.mark.parametrize("loops", [True, False])
def test_fingerprint_does_not_depend_on_the_loops_in_cpp(config, dtype, base, tmp_path, monkeypatch, loops):
    monkeypatch.setattr(backend, "library", library if loops else lambda: None)
    summary = train(config(dtype=dtype, workers=1, threads=1), tmp_path / "run")
    assert (summary.fingerprint, summary.weights) == (base.fingerprint, base.weights)


@pytest.mark.parametrize("overrides", BINDING, ids=_name)
def test_control_fingerprint_depends_on_seed_and_order(config, dtype, base, tmp_path, overrides):
    summary = train(config(dtype=dtype, **overrides), tmp_path / "run")
    assert summary.weights != base.weights
    assert summary.fingerprint != base.fingerprint
