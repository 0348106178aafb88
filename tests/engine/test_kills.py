"""A run that is killed at random moments and resumed each time ends with the ledger of an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from zerokl.engine.config_file import to_toml
from zerokl.engine.runs.run import train

# The most seconds from the first sign of work to the kill. Sampling, backward, ledger and checkpoints take
# turns in this time.
_SPAN_S = 1.5


def _start(words: list[str], cwd: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "zerokl", "train", *words],
        cwd=cwd,
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


def _kill_while_it_works(process: subprocess.Popen, path: Path, after_s: float) -> bool:
    """Kill the process with SIGKILL, `after_s` seconds after it has opened the run's files.

    Returns whether it was still at work.
    """
    before = _stamp(path)
    while process.poll() is None and _stamp(path) == before:
        time.sleep(0.01)
    time.sleep(after_s)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return alive


def _stamp(path: Path) -> tuple:
    """Changes when a process has begun to write to the run."""
    return (
        tuple(sorted((p.name, p.stat().st_size) for p in path.glob("tensorboard/*"))) if path.exists() else ()
    )


def kill_often(config_toml: str, path: Path, kills: int, seed: int) -> str:
    """Run into `path`, killed `kills` times. Returns the output of the last process."""
    draw, killed = random.Random(seed), 0
    (path.parent / "config.toml").write_text(config_toml)
    new = ["config.toml", "--run-dir", str(path)]
    while True:
        begun = (path / "config.toml").exists()
        process = _start(["--resume", str(path)] if begun else new, path.parent)
        if killed < kills:
            killed += _kill_while_it_works(process, path, draw.uniform(0, _SPAN_S))
            # The run ended before the kill. Without its summary, the next process does the end once more.
            if (path / "summary.json").exists():
                (path / "summary.json").unlink()
            continue
        output, _ = process.communicate()
        assert process.returncode == 0, output
        return output


def check_kills(config, tmp_path: Path, kills: int, seed: int, **overrides) -> None:
    cfg = config(
        steps=40,
        checkpoint__every=3,
        checkpoint__keep=3,
        evaluation__every=7,
        prompts=4,
        num_generations=8,
        **overrides,
    )
    expected = train(cfg, tmp_path / "alone")
    kill_often(to_toml(cfg), tmp_path / "run", kills, seed)
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
@pytest.mark.parametrize("workers", [1, 2])
def test_fifty_kills(config, tmp_path, workers):
    check_kills(config, tmp_path, 25, workers, workers=workers)
