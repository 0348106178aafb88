"""A run that is killed at random moments and resumed each time ends with the ledger of an undisturbed run."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.runs.run import train

from tests.helpers import torchrun

# The most seconds from the first sign of work to the kill. Sampling, backward, ledger and checkpoints take
# turns in this time.
_SPAN_S = 1.5
# The share of kills that strike at start-up, within so many seconds of the process's own start.
_EARLY, _EARLY_SPAN_S = 0.25, 4.0


def _start(words: list[str], cwd: Path, ranks: int) -> subprocess.Popen:
    train_words = ["zerokl", "train", *words]
    command = [sys.executable, "-m", *train_words] if ranks == 1 else torchrun(ranks, "-m", *train_words)
    return subprocess.Popen(
        command,
        cwd=cwd,
        start_new_session=True,  # a kill strikes the run's own processes together, as losing a machine does
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )


def _kill(process: subprocess.Popen, path: Path, draw: random.Random) -> bool:
    """Kill the run with SIGKILL, at start-up or some time after it has opened the run's files.

    Returns whether it was still at work.
    """
    if draw.random() < _EARLY:
        time.sleep(draw.uniform(0, _EARLY_SPAN_S))
    else:
        before = _stamp(path)
        while process.poll() is None and _stamp(path) == before:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, _SPAN_S))
    alive = process.poll() is None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return alive


def _stamp(path: Path) -> tuple:
    """Changes when a process has begun to write to the run."""
    return (
        tuple(sorted((p.name, p.stat().st_size) for p in path.glob("tensorboard/*"))) if path.exists() else ()
    )


def kill_often(config_toml: str, path: Path, kills: int, seed: int, ranks: int = 1) -> str:
    """Run into `path`, killed `kills` times. Returns the output of the last process."""
    draw, killed = random.Random(seed), 0
    (path.parent / "config.toml").write_text(config_toml)
    words = ["config.toml", "--run_dir", str(path), "--auto_resume"]
    while True:
        process = _start(words, path.parent, ranks)
        if killed < kills:
            killed += _kill(process, path, draw)
            # The run ended before the kill. Without its summary, the next process does the end once more.
            if (path / "summary.json").exists():
                (path / "summary.json").unlink()
            continue
        output, _ = process.communicate()
        assert process.returncode == 0, output
        return output


def check_kills(
    config, tmp_path: Path, kills: int, seed: int, ranks: int = 1, loss: dict | None = None, **overrides
) -> None:
    """Both runs have the settings of `loss`; the killed one has `overrides`, which must change no bit."""
    common = (loss or {}) | dict(
        steps=40,
        checkpoint__every=3,
        checkpoint__keep=3,
        evaluation__every=7,
        prompts=4,
        num_generations=8,
    )
    expected = train(config(**common), tmp_path / "alone")
    kill_often(to_toml(config(**common, **overrides)), tmp_path / "run", kills, seed, ranks)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["fingerprint"], summary["weights"]) == (expected.fingerprint, expected.weights)
    for name in ("ledger.jsonl", "rollouts.jsonl"):
        lines = (tmp_path / "run" / name).read_text().splitlines()
        lines = [line for line in lines if '"kind":"resumed"' not in line]
        undisturbed = (tmp_path / "alone" / name).read_text().splitlines()
        if name == "ledger.jsonl":
            # The head names the environment of another process.
            lines, undisturbed = lines[1:], undisturbed[1:]
        assert lines == undisturbed, name
    assert not list((tmp_path / "run").rglob("*.partial-*")) + list((tmp_path / "run").rglob("*.damaged*"))


@pytest.mark.full
def test_three_kills(config, tmp_path):
    check_kills(config, tmp_path, 3, 0)


@pytest.mark.proof
@pytest.mark.parametrize(("kills", "workers", "ranks"), [(70, 1, 1), (60, 2, 1), (40, 1, 2)])
def test_kills_at_random_moments(config, tmp_path, kills, workers, ranks):
    """With tests/vllm/test_kills.py, two hundred."""
    check_kills(config, tmp_path, kills, workers + ranks, ranks, workers=workers)


@pytest.mark.proof
def test_kills_between_reasonings_and_answers(config, tmp_path):
    """BRPO draws answers from reasonings that were cut, a second round of sampling in each step."""
    brpo = dict(loss__preset="brpo", task__answer_prefix=">=", loss__budgets=[1, 3], loss__answers=2)
    lengths = dict(sampling__max_tokens=3, sampling__answer_max_tokens=4)
    check_kills(config, tmp_path, 30, 0, loss=brpo | lengths, workers=2)
