"""Weights & Biases, Trackio and MLflow, the real libraries, offline: what they hold of a resumed run."""

import json
from pathlib import Path

import mlflow
import pytest
from trackio import sqlite_storage as trackio_storage
from zerokl.engine.runs.trackers import TRACKERS, Trackers

pytestmark = pytest.mark.trackers
SETTINGS = {"optimizer.lr": 1e-3, "task.options": {"max_value": 9}}
ROW = {"step": 0, "prompt_text": "1+1=", "text": "2", "reward": 1.0, "advantage": 0.5, "finish": "stop"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run of four steps that was interrupted after two, and went on."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("ZEROKL_PROJECT", "sums")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run"
    path.mkdir()
    part(path, range(2), None, {})
    ids = json.loads((path / TRACKERS).read_text())
    part(path, range(2, 4), 2, {"fingerprint": "abc123"})
    assert "tracking:" not in capsys.readouterr().out, "no tracker failed"
    assert json.loads((path / TRACKERS).read_text()) == ids
    assert set(ids) == {"wandb", "trackio", "mlflow"}
    return path


def part(path: Path, steps: range, steps_done: int | None, summary: dict[str, str]) -> None:
    names = ("wandb", "trackio", "mlflow")
    trackers = Trackers(names, path, 4, steps_done, SETTINGS, {"torch": "2.13.0"})
    for step in steps:
        trackers.record({"step": step, "reward/mean": 0.5 + step, "entropy": 1.0}, [ROW | {"step": step}])
    trackers.close(summary)


def run_id(path: Path, name: str) -> str:
    return json.loads((path / TRACKERS).read_text())[name]


def test_wandb_goes_on_with_one_run(run):
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id(run, 'wandb')}.wandb"] * 2
    first, second = (file.read_bytes() for file in files)
    for words in (b"optimizer.lr", b"2.13.0", b"reward/mean", b"train/reward", b"critic/rewards/mean"):
        assert words in first, words
    assert b"abc123" not in first
    assert b"abc123" in second
    tables = [json.loads(f.read_text()) for f in run.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert len(tables) == 4
    assert ["1+1=", "2", 1.0, 0.5, "stop"] in [table["data"][0][1:] for table in tables]


def test_trackio_goes_on_with_one_run(run, tmp_path):
    name = run_id(run, "trackio")
    assert name in trackio_storage.SQLiteStorage.get_runs("sums")
    logs = trackio_storage.SQLiteStorage.get_logs("sums", name)
    assert [(x["step"], x["train/reward"]) for x in logs if "train/reward" in x] == [
        (step, 0.5 + step) for step in range(4)
    ]
    assert sum("rollouts" in x for x in logs) == 4
    assert "abc123" in [x.get("fingerprint") for x in logs]
    assert trackio_storage.SQLiteStorage.get_run_config("sums", name)["optimizer.lr"] == 1e-3


def test_mlflow_goes_on_with_one_run(run):
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("sums")
    (mlflow_run,) = client.search_runs([experiment.experiment_id])
    assert mlflow_run.info.run_id == run_id(run, "mlflow")
    assert mlflow_run.info.status == "FINISHED"
    assert mlflow_run.data.params["optimizer.lr"] == "0.001"
    assert mlflow_run.data.tags["fingerprint"] == "abc123"
    assert mlflow_run.data.tags["environment.torch"] == "2.13.0"
    history = client.get_metric_history(mlflow_run.info.run_id, "train/reward")
    assert [(m.step, m.value) for m in history] == [(step, 0.5 + step) for step in range(4)]
    tables = client.list_artifacts(mlflow_run.info.run_id, "rollouts")
    assert [Path(t.path).name for t in tables] == [f"step-{step:06d}.json" for step in range(4)]
