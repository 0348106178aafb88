"""Runs with Muon, and with moments in 8 bits: exact, verified, resumed, the same over workers and ranks."""

from collections.abc import Callable
from typing import Any

import pytest
from zerokl.engine.runs.run import train
from zerokl.engine.train import moments, muon
from zerokl.engine.train.optimizer import Optimizer
from zerokl.kernels.polar import polar

from tests.engine.runs.exact_runs import assert_done_again, faults, train_exactly
from tests.engine.train.parallel.test_ranks import _run, _same, _same_metrics

CASES: dict[str, dict[str, Any]] = {
    "muon": {"optimizer__name": "muon", "dtype": "bfloat16"},
    "int8": {"optimizer__moments": "int8", "dtype": "bfloat16"},
    "muon, bf16 moments": {
        "optimizer__name": "muon",
        "optimizer__moments": "bfloat16",
        "optimizer__adjust_lr": "original",
        "optimizer__weight_decay": 0.1,
        "updates_per_rollout": 2,
        "loss__preset": "ppo",
    },
}


FULL = pytest.mark.full


@pytest.mark.parametrize("case", ["muon", "int8", pytest.param("muon, bf16 moments", marks=FULL)])
def test_a_run_is_verified_cut_otherwise_and_resumed(config, tmp_path, case):
    settings = CASES[case]
    run = train_exactly(config(**settings, checkpoint__every=1), tmp_path / "run")
    assert_done_again(run, tmp_path / "run", config, **settings)


@FULL
@pytest.mark.parametrize("engine", ["replicated", "fsdp"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_ledger_of_one(config, tmp_path, case, engine):
    settings = CASES[case]
    if (case, engine) == ("int8", "fsdp"):
        pytest.skip("it is refused, which is tested below")
    train_exactly(config(**settings), tmp_path / "alone")
    _run(2, config(**settings, parallel__engine=engine), tmp_path / "run")
    _same(tmp_path / "run", tmp_path / "alone")
    _same_metrics(tmp_path / "run", tmp_path / "alone")


PLANTED: dict[str, tuple[str, object, str, Callable[..., object]]] = {
    "another number of products": ("muon", muon, "polar", lambda m, iterations: polar(m, iterations + 1)),
    "the momentum after the direction": ("muon", Optimizer, "_direction", lambda *x: _late(*x)),
    "a code of its neighbour": ("int8", moments, "encode", lambda x, signed: _off_by_one(x, signed)),
}
_direction, _encode = Optimizer._direction, moments.encode


def _late(optimizer: Optimizer, place: slice, grad, grad_scale: float):
    with optimizer._first.brought(place) as momentum:
        before = momentum.clone()
    _direction(optimizer, place, grad, grad_scale)
    return before


def _off_by_one(x, signed: bool):
    codes, scales = _encode(x, signed)
    codes[0] ^= 1
    return codes, scales


@FULL
@pytest.mark.parametrize("fault", PLANTED)
def test_control_a_planted_fault_is_seen_by_verify_run(config, tmp_path, monkeypatch, fault):
    case, holder, name, planted = PLANTED[fault]
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, planted)
        train(config(**CASES[case], checkpoint__every=1), path)
    assert any("optimizer" in line or "weights" in line for line in faults(path)), faults(path)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"optimizer__nesterov": False}, r'optimizer.nesterov is of name = "muon", not of "adamw"'),
        ({"optimizer__name": "muon", "optimizer__moments": "int8"}, r'optimizer.moments \("int8"\) with'),
        ({"optimizer__moments": "int8", "precision__leaves": 2, "parallel__tensor": 2}, "parallel.tensor"),
        (
            {"optimizer__moments": "int8", "parallel__engine": "fsdp"},
            r'parallel.engine \("fsdp"\) with optim',
        ),
        ({"optimizer__name": "muon", "lora__rank": 4}, r'optimizer.name \("muon"\) with lora.rank \(4\)'),
    ],
)
def test_what_does_not_go_together_is_refused(config, settings, refusal):
    with pytest.raises(ValueError, match=f"^config: {refusal}"):
        config(**settings)
