"""A run whose rewards teach nothing says so, at the step and at its end; one with signal does not."""

import json

from zerokl.engine.runs.ending import figures
from zerokl.engine.runs.run import train


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
