"""Steps of the demo with and without actors, by turns, on the cores of this machine.

    .venv-ray/bin/python -m zerokl.benchmarks.pool_step [--model runs/demo/base] [--steps 24] [--turns 3]

All runs are late by one step (max_staleness = 1, staleness_schedule = "lagged"), and must have one
fingerprint.

    alone      two workers draw, and then train
    1 actor    one actor draws, while one worker trains
    2 actors   two actors draw, while two workers train: the cores change hands

The seconds of a step are the median without the first three, in which actors start.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from zerokl.engine.config.config_file import load_config
from zerokl.engine.runs.run import train

LAGGED = {"max_staleness": 1, "staleness_schedule": "lagged", "evaluation.every": 0, "tracking": []}
KINDS = {
    "alone": {"workers": 2},
    "1 actor": {"workers": 1, "threads": 1, "pool.engine": "ray", "pool.actors": 1},
    "2 actors": {"workers": 2, "pool.engine": "ray", "pool.actors": 2},
}
STARTING = 3


def run(settings: dict[str, object], folder: Path) -> tuple[str, float, dict[str, float]]:
    """The fingerprint, the seconds of a step, and the last step's metrics pool/*."""
    summary = train(load_config(None, "demo", LAGGED | settings), folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [m["time/sample_s"] + m["time/train_s"] for m in lines[STARTING:]]
    pool = {k: statistics.median(m[k] for m in lines[STARTING:]) for k in lines[0] if k.startswith("pool/")}
    return summary.fingerprint, statistics.median(seconds), pool


def main() -> None:
    """Print each run and the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="init:tiny")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    fingerprints, ratios = set(), {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.turns):
            alone_s = 0.0
            for kind, settings in KINDS.items():
                chosen = settings | {"model": args.model, "steps": args.steps}
                fingerprint, step_s, pool = run(chosen, Path(folder) / f"{turn} {kind}")
                fingerprints.add(fingerprint)
                alone_s = alone_s or step_s
                ratios[kind].append(step_s / alone_s)
                words = "  ".join(f"{name[5:]} {value:.2f}" for name, value in pool.items())
                print(f"{turn} {kind:<9} {step_s:.3f} s a step  {words}", flush=True)
    assert len(fingerprints) == 1, fingerprints
    for kind, values in ratios.items():
        middle, least, most = statistics.median(values), min(values), max(values)
        print(f"{kind:<9} {middle:.2f} of the time alone ({least:.2f} to {most:.2f})")


if __name__ == "__main__":
    main()
