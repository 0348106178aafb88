"""SmolLM2-135M-Instruct learns to count, exactly: all weights trained, and LoRA adapters of rank 16.

    python benchmarks/real/train.py MODEL OUT [KEY=VALUE ...]

Each run is a process of its own, with the settings of train.toml and those that are given. Prints of each its
reward over the first and the last three steps, its mismatch, seconds of a step, and the most memory that one
process had. Writes them to OUT/summary.json.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

# The adapters' learning rate is their own.
RUNS = {"all weights": {}, "rank 16": {"lora.rank": "16", "optimizer.lr": "2e-4"}}
CONFIG = Path(__file__).with_name("train.toml")


def run(
    model: str, folder: Path, settings: dict[str, str], config: Path = CONFIG
) -> tuple[list[dict], float]:
    """Train by a config with these settings: the metrics of each step, and the most memory in GiB.

    Raises SystemExit where it fails.
    """
    command = [sys.executable, "-P", "-m", "zerokl", "train", str(config), "--model", model]
    command += ["--run_dir", str(folder)]
    for key, value in settings.items():
        command += [f"--{key}", value]
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"train: {' '.join(command)} ended with {process.returncode}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, usage.ru_maxrss / (1 << 20)


def train(model: str, folder: Path, settings: dict[str, str]) -> dict[str, float]:
    """One run, and its figures."""
    rows, most_gib = run(model, folder, settings)
    rewards = [row["reward/mean"] for row in rows]
    return {
        "reward, first steps": statistics.fmean(rewards[:3]),
        "reward, last steps": statistics.fmean(rewards[-3:]),
        "unequal share": max(1.0 - row["mismatch/frac_equal"] for row in rows),
        "s a step": statistics.median(row["time/sample_s"] + row["time/train_s"] for row in rows),
        "GiB at most": most_gib,
    }


def main() -> None:
    """Train both, and print their figures side by side."""
    model, out, *pairs = sys.argv[1:]
    given = dict(pair.split("=", 1) for pair in pairs)
    figures = {}
    for name, settings in RUNS.items():
        figures[name] = train(model, Path(out) / name.replace(" ", "-"), settings | given)
    for what in figures["rank 16"]:
        print(f"{what}: " + ", ".join(f"{figures[name][what]:.4g} ({name})" for name in RUNS))
    (Path(out) / "summary.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
