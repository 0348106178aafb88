"""Hundreds of steps have mismatch 0.0 throughout and flat memory, and their ledger holds at the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import write_letters_reward
from tests.random_model import ONE_LAYER, random_model

pytestmark = pytest.mark.slow

# Prints the resident memory after each step, in pages, and the mismatch of the run.
_CODE = """
import json, sys
from zerokl.engine.runs import run
from zerokl.engine.config.config_file import load_config
plain, pages = run.train_step, []
def measured(state, recorder):
    record = plain(state, recorder)
    pages.append(int(open("/proc/self/statm").read().split()[1]))
    return record
run.train_step = measured
summary = run.train(load_config(None, None, json.loads(sys.argv[1])), sys.argv[2])
print(json.dumps({"pages": pages, "unequal": summary.tokens_unequal, "max_abs": summary.mismatch_max_abs}))
"""


@pytest.mark.parametrize("steps", [300, pytest.param(1000, marks=pytest.mark.proof)])
def test_many_steps_stay_exact_and_flat(tmp_path: Path, steps: int):
    model = random_model(tmp_path, ONE_LAYER)
    overrides = {
        "model": str(model),
        "steps": str(steps),
        "prompts": "2",
        "num_generations": "4",
        "sampling.max_tokens": "4",
        "workers": "1",
        "threads": "1",
        "evaluation.every": "0",
        "checkpoint.every": str(steps // 4),
        "checkpoint.keep": "2",
        "optimizer.lr": "1e-5",
        "task.options": {"max_value": 9, "train": 50, "held_out": 10},
        "virtual_shards": "2",
        "task.reward": "letters_reward:reward",
    }
    write_letters_reward(tmp_path)
    run = tmp_path / "run"
    command = [sys.executable, "-c", _CODE, json.dumps(overrides), str(run)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    report = json.loads(process.stdout.splitlines()[-1])
    assert (report["unequal"], report["max_abs"]) == (0, 0.0)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [m["step"] for m in metrics] == list(range(steps))
    assert {m["mismatch/max_abs"] for m in metrics} == {0.0}
    assert sum(m["grad_norm"] > 0 for m in metrics) > 0.9 * steps, "a step without a gradient proves little"
    pages = report["pages"]
    # A run keeps the metrics of each step, a few hundred bytes in lists. A leak of one gradient a step would
    # be 100 times as much.
    assert max(pages[-100:]) - max(pages[100:200]) < (8 << 20) // 4096, pages[::50]
    kept = [f"step-{step:06}" for step in (3 * steps // 4, steps)]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == kept
    command = [sys.executable, "-m", "zerokl", "verify", "run", str(run), "--replays", "1"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"{steps} steps, chain unbroken" in process.stdout
