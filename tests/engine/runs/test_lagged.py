"""Weights that are late by whole steps: which ones draw, and a run goes on from its checkpoints."""

import dataclasses

import numpy as np
import pytest
import torch
from zerokl.cli import main
from zerokl.engine.rollout.older_weights import OlderWeights, Snapshot
from zerokl.engine.runs import run as run_module
from zerokl.engine.runs.run import resume, train
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.scoring import logprobs, pack

from tests.helpers import total_unequal

LAGGED = {"staleness_schedule": "lagged", "max_staleness": 2, "checkpoint__every": 1, "steps": 5}


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    return path, train(config(dtype="bfloat16", **LAGGED), path)


def test_each_step_draws_with_the_weights_of_so_many_steps_before(whole, read_jsonl, config):
    """The checkpoint of step t - 2 scores the rollouts of step t with their own bits."""
    path, summary = whole
    rollouts = read_jsonl(path / "rollouts.jsonl")
    assert {r["step"]: r["weight_version"] for r in rollouts} == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2}
    assert (summary.tokens_unequal, summary.mismatch_max_abs) == (0, 0.0)
    versions = [m["staleness/versions"] for m in read_jsonl(path / "metrics.jsonl")]
    assert versions == [0, 1, 2, 2, 2]
    for step in (3, 4):
        step_rollouts = [r for r in rollouts if r["step"] == step]
        batch = pack([(r["prompt_ids"], r["completion_ids"]) for r in step_rollouts])
        drawn = torch.from_numpy(np.concatenate([np.float32(r["logprobs"]) for r in step_rollouts]))
        unequal = {}
        for before in (1, 2, 3):
            folder = path / "checkpoints" / f"step-{step - before:06d}"
            if folder.exists():
                with torch.no_grad():
                    logp, _ = logprobs(load_decoder(folder, torch.bfloat16), batch, SamplingParams())
                unequal[before] = total_unequal([logp], [drawn])
        assert unequal.pop(2) == 0
        assert all(unequal.values()), "control: other steps' weights have other bits"


class _StoppedError(Exception):
    pass


def _stopped(config, path, step, monkeypatch):
    """A run that was killed after `step` steps."""
    train_step = run_module.train_step

    def stops(state, recorder):
        if state.step == step:
            raise _StoppedError
        return train_step(state, recorder)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "train_step", stops)
        with pytest.raises(_StoppedError):
            train(config, path)


@pytest.mark.parametrize(
    ("settings", "step"),
    [
        ({"dtype": "bfloat16"}, 3),
        pytest.param({"dtype": "bfloat16"}, 1, marks=pytest.mark.full),
        pytest.param({"exact": False, "precision__sampler_dtype": "bfloat16"}, 3, marks=pytest.mark.full),
        pytest.param({"lora__rank": 2}, 3, marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_has_the_older_weights(config, tmp_path, monkeypatch, whole, capsys, settings, step):
    cfg, path = config(**LAGGED, **settings), tmp_path / "run"
    expected = whole[1] if settings == {"dtype": "bfloat16"} else train(cfg, tmp_path / "whole")
    _stopped(cfg, path, step, monkeypatch)
    assert resume(path).fingerprint == expected.fingerprint
    assert f"going on at step {step} of 5, from" in " ".join(capsys.readouterr().out.split())
    assert main(["verify", "run", str(path), "--replays", "1"]) == 0
    assert main(["replay", str(path), "--step", "4"]) == 0


def test_control_without_the_older_weights_a_resumed_run_has_other_bits(config, tmp_path, monkeypatch, whole):
    cfg, path = config(dtype="bfloat16", **LAGGED), tmp_path / "run"
    _stopped(cfg, path, 3, monkeypatch)
    monkeypatch.setattr(OlderWeights, "reset", lambda self, before=(): self._kept.clear())
    assert resume(path).fingerprint != whole[1].fingerprint


def test_the_snapshot_that_is_due():
    """Beside the definition: step t draws with the weights of step max(0, t - lag)."""
    for lag in range(4):
        older = OlderWeights(lag)
        for step in range(7):
            older.push(Snapshot(step, torch.zeros(0), torch.zeros(0)))
            for ahead in range(lag + 1):
                assert older.due(ahead).version == max(0, step + ahead - lag)
            assert [s.version for s in older.before] == list(range(max(0, step - lag), step))


def test_a_checkpoint_of_another_lag_is_refused(config, tmp_path, monkeypatch):
    cfg, path = config(dtype="bfloat16", **LAGGED), tmp_path / "run"
    _stopped(cfg, path, 3, monkeypatch)
    opened = run_module.restore

    def restore(state, checkpoint):
        opened(state, dataclasses.replace(checkpoint, older_versions=checkpoint.older_versions[1:]))

    monkeypatch.setattr(run_module, "restore", restore)
    with pytest.raises(ValueError, match="holds the weights of 1 earlier steps, and a lag of 2 steps"):
        resume(path)
