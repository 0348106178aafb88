"""Trackers around a run: none of them ends it, slows it, or changes a bit of it."""

import json
import threading
from typing import ClassVar

import pytest
from zerokl.engine.runs import trackers
from zerokl.engine.runs.run import resume, train
from zerokl.engine.runs.trackers import TRACKERS, Trackers


class Notebook:
    """A tracker that keeps all it hears in the class."""

    heard: ClassVar[list] = []

    def __init__(self, start):
        self.run_id = start.run_id or "first"
        self.heard.append(("start", self.run_id, start.steps_done, start.settings["optimizer.lr"]))

    def log(self, step, metrics):
        self.heard.append(("log", step, metrics["reward/mean"]))

    def table(self, step, rows):
        self.heard.append(("table", step, len(rows)))

    def close(self, summary):
        self.heard.append(("close", summary))


class FailsAtOnce(Notebook):
    def __init__(self, start):
        raise SystemExit("no\nkey")


class FailsLater(Notebook):
    def log(self, step, metrics):
        raise RuntimeError("the disk is full")


class Waits(Notebook):
    go_on = threading.Event()

    def log(self, step, metrics):
        self.go_on.wait(20)


@pytest.fixture
def tracker(monkeypatch):
    """tracker(cls): the run's tracker `wandb` is this class."""
    monkeypatch.setattr(Notebook, "heard", [])
    monkeypatch.setattr(trackers, "require_trackers", lambda names: None)
    monkeypatch.setattr("zerokl.engine.runs.run.require_trackers", lambda names: None)

    def use(cls):
        monkeypatch.setitem(trackers._MAKERS, "wandb", cls)

    return use


@pytest.fixture(scope="module")
def plain(config, tmp_path_factory):
    """The fingerprint of the run without a tracker."""
    return train(config(steps=4, tracking=()), tmp_path_factory.mktemp("plain") / "run").fingerprint


def test_a_tracker_hears_every_step_and_the_fingerprint(config, tmp_path, tracker, plain):
    tracker(Notebook)
    summary = train(config(steps=4, tracking=("wandb",)), tmp_path / "run")
    heard = Notebook.heard
    assert heard[0][:3] == ("start", "first", None)
    assert [x[1] for x in heard if x[0] == "log"] == [0, 1, 2, 3]
    assert [x for x in heard if x[0] == "table"] == [("table", step, 9) for step in range(4)]
    assert heard[-1] == ("close", {"fingerprint": summary.fingerprint})
    assert summary.fingerprint == plain
    assert json.loads((tmp_path / "run" / TRACKERS).read_text()) == {"wandb": "first"}
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize(
    ("cls", "reason"), [(FailsAtOnce, "no key"), (FailsLater, "the disk is full")], ids=["at once", "later"]
)
def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(
    config, tmp_path, tracker, plain, capsys, cls, reason
):
    tracker(cls)
    summary = train(config(steps=4, tracking=("wandb",)), tmp_path / "run")
    printed = capsys.readouterr().out
    assert printed.count("tracking:") == 1
    assert f"tracking: wandb failed ({reason}); the run goes on without it" in printed
    assert summary.fingerprint == plain


def test_a_tracker_that_is_too_slow_loses_steps_and_the_run_does_not_wait(
    tmp_path, tracker, monkeypatch, capsys
):
    tracker(Waits)
    monkeypatch.setattr(trackers, "_WAITING", 3)
    several = Trackers(("wandb",), tmp_path, 9, None, {"optimizer.lr": 1.0}, {})
    for step in range(9):
        several.record({"step": step, "reward/mean": 0.0}, [])
    assert not Waits.go_on.is_set()
    Waits.go_on.set()
    several.close({})
    assert capsys.readouterr().out.count("too slow") == 1
    assert Notebook.heard[-1] == ("close", {})


def test_a_resumed_run_goes_on_in_the_same_tracker_run(config, tmp_path, tracker, plain, monkeypatch):
    tracker(Notebook)

    def interrupted(*_):
        raise KeyboardInterrupt

    settings = config(steps=4, tracking=("wandb",), checkpoint__every=2)
    with monkeypatch.context() as patch:
        patch.setattr("zerokl.engine.runs.run._report_overflow", lambda s, r: s.step == 3 and interrupted())
        with pytest.raises(KeyboardInterrupt):
            train(settings, tmp_path / "run")
    assert Notebook.heard[-1] == ("close", {})
    Notebook.heard.clear()
    assert resume(tmp_path / "run").fingerprint == plain
    assert Notebook.heard[0][:3] == ("start", "first", 2)
    assert [x[1] for x in Notebook.heard if x[0] == "log"] == [2, 3]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_made(config, tmp_path, monkeypatch):
    monkeypatch.setitem(trackers._PACKAGES, "wandb", "no_such_package")
    with pytest.raises(ValueError, match=r"wandb is not installed; pip install 'wandb>=0.19', or"):
        train(config(tracking=("wandb",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
