"""A run whose rewards teach nothing, or fail, says so at the step, at its end and on its page."""

import json

import pytest
from zerokl.engine.runs.ablations.cells import CellRun, State
from zerokl.engine.runs.ablations.grid import Cell
from zerokl.engine.runs.ending import figures
from zerokl.engine.runs.report.page import open_sources
from zerokl.engine.runs.run import resume, train

from tests.helpers import importable

# Rewards that fail in the second step: each step has 9 completions. A file of its own turns the fault off.
FAILING = """
import os, signal, threading, time
calls = 0

def _second_step():
    global calls
    calls += 1
    return calls > 9 and not os.path.exists("mended")

def missing(problem, completion):
    return None if _second_step() else float(len(completion))

def not_a_number(problem, completion):
    return float("nan") if _second_step() else float(len(completion))

def hangs(problem, completion):
    if _second_step():
        endless = threading.Thread(target=threading.Event().wait)
        endless.start()
        endless.join()
    return float(len(completion))

def alarm(problem, completion):
    "A limit of time as libraries of verifiers set it. Outside of a main thread it raises ValueError."
    def late(*_):
        raise TimeoutError
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        time.sleep(60)
    except TimeoutError:
        return float(len(completion))
"""


def _lines(config, folder, capsys, **settings) -> tuple[list[str], list[str]]:
    """What a run prints of its steps and at its end, of those lines that speak of signal."""
    summary = train(config(**settings), folder)
    steps = [line for line in capsys.readouterr().out.splitlines() if "no signal" in line]
    return steps, [line for line in figures(summary, folder) if "no signal" in line]


def test_equal_rewards_are_told_once_and_counted(config, tmp_path, capsys):
    steps, end = _lines(config, tmp_path / "run", capsys, task__reward="toy:constant")
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [m["grad_norm"] for m in metrics] == [0.0] * 3
    (line,) = steps
    assert line.startswith("step 0: no signal")
    assert "in 3 of 3 groups" in line
    assert "(mean 0.1)" in line
    cut = metrics[0]["completions/cut"]
    assert cut > 0
    assert line.endswith(f"{cut} of 9 completions are cut")
    assert end == ["no signal in 3 of 3 steps: their gradient was exactly 0"]


def test_rewards_that_differ_are_signal(config, tmp_path, capsys):
    assert _lines(config, tmp_path / "run", capsys) == ([], [])


def test_a_kl_term_is_a_gradient(config, tmp_path, capsys):
    settings = {"task__reward": "toy:constant", "loss__kl_coef": 0.1, "updates_per_rollout": 2}
    steps, end = _lines(config, tmp_path / "run", capsys, **settings, max_staleness=0)
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    silent = sum(m["grad_norm"] == 0.0 for m in metrics)
    assert bool(steps) == bool(silent)
    assert end == ([f"no signal in {silent} of 3 steps: their gradient was exactly 0"] if silent else [])


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        ("missing", "reward: raised TypeError (its value is of the type NoneType; it must be a number) for "),
        ("not_a_number", "reward: is nan for "),
        ("hangs", "reward: took more than 2 s (task.reward_timeout_s) for "),
    ],
)
def test_a_reward_that_fails_is_named_with_its_step(config, tmp_path, monkeypatch, reward, reason):
    monkeypatch.chdir(tmp_path)
    settings = {"task__reward": f"failing:{reward}", "task__reward_timeout_s": 2, "checkpoint__every": 1}
    with importable(tmp_path, "failing", FAILING):
        with pytest.raises(ValueError, match=r"^step 1: reward") as caught:
            train(config(**settings), tmp_path / "run")
        line = str(caught.value)
        assert line.startswith(f"step 1: {reason}prompt ")
        status = open_sources([tmp_path / "run"])[0].payload()["status"]
        assert status == {"state": "stopped", "text": f"ended by itself after 1 steps: {line}"}
        cell = CellRun(Cell("one", {}, config(**settings)), tmp_path / "run")
        assert cell.state is State.LEFT, "an ablation does it again: it is no result"
        (tmp_path / "mended").touch()
        assert resume(tmp_path / "run").steps == 3  # nothing of the step that failed is left


def test_a_reward_may_use_an_alarm(config, tmp_path):
    """It is called in the main thread of its process: in another thread each call would raise."""
    with importable(tmp_path, "failing", FAILING):
        assert train(config(task__reward="failing:alarm", steps=1), tmp_path / "run").reward_last > 0.0
