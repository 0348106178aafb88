"""Exactness: the law on a model, exact policy gradient, and whole runs of the kinds that users start.

- the law, on a model with the widths of Qwen3-0.6B and two layers, in three dtypes;
- 20 steps of policy gradient, twice with one fingerprint;
- a KL term to a frozen reference, and rollouts of older weights;
- a run that is killed with SIGKILL and resumed, beside one that is left alone.
"""

import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from zerokl.benchmarks.device.runs import Run, settings, take_steps, write_model
from zerokl.benchmarks.exactness import exactness
from zerokl.benchmarks.machine import Machine, Row, name_of

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What a run's folder needs beside the packages of device.sh.
FOLDER_PACKAGES = ("tensorboard", "tomli_w")
# Seconds for a process to come to its third step, with its kernels to compile.
_START_S = 90


def reinforcement(m: Machine) -> Iterator[Row]:
    """20 steps (small: 2) of policy gradient with the native sampler, run twice.

    Every logprob is compared, and every step must change the weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(m, Path(folder), 2, 128)
        for dtype in _DTYPES[:2]:
            values = settings(m, model, dtype, 2 if m.small else 20)
            what = f"policy gradient {name_of(dtype)}"
            first, second = take_steps(values), take_steps(values)
            yield from second.beside(first, what)
            still = sum(step["update/moved"] == 0.0 for step in first.steps)
            yield {"what": f"{what}: steps that left the weights as they were", "unequal": still}


def reference_and_staleness(m: Machine) -> Iterator[Row]:
    """Runs with a reference, and with a sampler whose weights are one update old."""
    steps = 3 if m.small else 6
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(m, Path(folder), 2, 128 if m.small else 4096)
        for dtype in _DTYPES:
            plain = settings(m, model, dtype, steps)
            yield from _reference_rows(name_of(dtype), take_steps(plain | {"loss": {"kl_coef": 0.05}}))
            yield from _staleness_rows(name_of(dtype), take_steps(plain | {"max_staleness": 1}))


def _reference_rows(dtype: str, run: Run) -> Iterator[Row]:
    what = f"KL reference {dtype}"
    first, *others = run.steps
    yield {"what": f"{what}: {run.tokens} tokens, trainer against sampler", "unequal": run.unequal}
    # At the first step the reference is the model itself.
    unequal = round(first["tokens"] * (1 - first["ref/frac_equal"]))
    yield {"what": f"{what}: first step, reference against sampler", "unequal": unequal}
    same = sum(m["ref/frac_equal"] == 1.0 for m in others)
    yield {"what": f"{what}: later steps in which the model is still the reference", "unequal": same}


def _staleness_rows(dtype: str, run: Run) -> Iterator[Row]:
    what = f"stale rollouts {dtype}"
    yield {"what": f"{what}: {run.tokens} tokens, older weights against sampler", "unequal": run.unequal}
    stale = [m for m in run.steps if m["staleness/versions"]]
    yield {"what": f"{what}: without any step of older weights", "unequal": int(not stale)}
    same = sum(m["staleness/frac_equal"] == 1.0 for m in stale)
    yield {"what": f"{what}: such steps in which the trainer still has the older logprobs", "unequal": same}


def kill_and_resume(m: Machine, dtype: torch.dtype = torch.bfloat16) -> Iterator[Row]:
    """Two runs by the command line at the same time; one is killed after two steps, and resumed."""
    missing = [name for name in FOLDER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        yield {"what": f"kill and resume: not compared ({', '.join(missing)} is missing)"}
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(m, folder, 2, 128 if m.small else 4096)
        words = [*words_of(settings(m, model, dtype, 6)), "--checkpoint.every", "1"]
        whole, killed = (_start([*words, "--run_dir", str(folder / run)]) for run in ("whole", "killed"))
        processes = [whole, killed]
        try:
            steps = _kill_after(killed, folder / "killed" / "metrics.jsonl", 2)
            processes.append(_start(["--resume", str(folder / "killed")]))
            outputs = [process.communicate(timeout=m.left_s())[0] for process in (whole, processes[-1])]
        finally:
            for process in processes:
                process.kill()
        summaries = [summary_of(folder / run, outputs[i]) for i, run in enumerate(("whole", "killed"))]
    unequal = sum(summaries[0][key] != summaries[1][key] for key in ("fingerprint", "weights"))
    yield {"what": f"kill -9 after {steps} of 6 steps and resume {name_of(dtype)}", "unequal": unequal}


def words_of(values: dict[str, object], prefix: str = "") -> list[str]:
    """The settings as words of a command line."""
    words: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict):
            words += words_of(value, f"{prefix}{key}.")
        else:
            words += [f"--{prefix}{key}", str(value)]
    return words


def _start(words: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-P", "-m", "zerokl", "train", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _kill_after(process: subprocess.Popen, metrics: Path, steps: int) -> int:
    """Kill the process once it has written `steps` lines of metrics. Returns how many there are then."""
    began = time.perf_counter()
    while process.poll() is None and time.perf_counter() - began < _START_S:
        if metrics.exists() and metrics.read_text().count("\n") >= steps:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    output = process.communicate()[0]
    if process.returncode != -signal.SIGKILL or not metrics.exists():
        raise RuntimeError(f"the run ended before it was killed: {output[-400:]}")
    return metrics.read_text().count("\n")


def summary_of(folder: Path, output: str) -> dict[str, object]:
    path = folder / "summary.json"
    if not path.exists():
        raise RuntimeError(f"{folder.name} did not end: {output[-400:]}")
    return json.loads(path.read_text())


SECTIONS = (exactness, reinforcement, reference_and_staleness, kill_and_resume)
