"""Logs of resumed runs of zerokl, read without its ledger: a state that the resume lost is named."""

import shutil
from pathlib import Path

import pytest
import torch
from zerokl.cli import main
from zerokl.engine.rollout.types import RngKey
from zerokl.engine.runs import run as runs
from zerokl.engine.runs.run import resume, train
from zerokl.engine.train import collect

FAULTS = {
    "optimizer": "So the optimizer's state was lost",
    "weights": "other numbers for the same tokens",
    "loader": "the data loader was not restored, and restarted at its beginning",
    "generator": "compare seeds",
    "scaler": "the loss scaler's state was not restored",
}
LESS = [pytest.param(name, marks=pytest.mark.full) for name in ("weights", "loader", "generator", "scaler")]
HALF = dict(dtype="float16", precision__growth_interval=1, precision__scale=64)


def plant(patch: pytest.MonkeyPatch, fault: str) -> None:
    """Lose one state in every resume from now on."""
    restore, problems = runs.restore, collect.step_problems

    def losing(state, checkpoint):
        restore(state, checkpoint)
        with torch.no_grad():
            if fault == "optimizer":
                for moment in state.optimizer.moments:
                    moment.zero_()
            if fault == "weights":  # saved in 16 bits
                master = state.optimizer.weights.whole().bfloat16().float()
                state.optimizer.weights.load(master)
                state.sampler.sync_weights(state.version)
            if fault == "scaler":
                state.scaler.load({**checkpoint.scaler, "scale": 64.0})

    patch.setattr(runs, "restore", losing)
    if fault == "loader":
        patch.setattr(collect, "step_problems", lambda n, p, seed, draws: problems(n, p, seed, draws - 2))
    if fault == "generator":
        patch.setattr(collect, "RngKey", lambda seed, step, **more: RngKey(seed + 1, step, **more))


def logs(run: Path) -> str:
    """The logs of a run, without what only zerokl writes."""
    folder = run.with_name(f"{run.name}-logs")
    folder.mkdir()
    for name in ("rollouts.jsonl", "metrics.jsonl"):
        shutil.copy(run / name, folder / name)
    return str(folder)


@pytest.mark.parametrize("fault", ["", "optimizer", *LESS])
def test_a_state_that_a_resume_lost_is_named(config, tmp_path, capsys, monkeypatch, fault):
    settings = HALF if fault == "scaler" else {}
    train(config(steps=5, **settings), tmp_path / "a")
    train(config(steps=2, **settings), tmp_path / "b")
    plant(monkeypatch, fault)
    resume(tmp_path / "b", {"steps": 5})
    capsys.readouterr()
    sides = [logs(tmp_path / name) for name in ("a", "b")]
    code = main(["diff", *sides, "--resumed_at", "2"])
    words = " ".join(capsys.readouterr().out.split())
    assert code == (1 if fault else 0), words
    assert [name for name, text in FAULTS.items() if text in words] == ([fault] if fault else []), words
    if fault in ("optimizer", "weights"):  # without the step of the resume the two look the same
        assert main(["diff", *sides]) == 1
        assert "--resumed_at tells them apart" in " ".join(capsys.readouterr().out.split())
    if not fault:
        assert "optimizer: equal, shown by the numbers of 2 steps after an update" in words
