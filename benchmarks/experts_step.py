"""A step of a mixture of experts beside a step of a dense model in which a token takes as many products.

    .venv/bin/python benchmarks/experts_step.py

The models are those of `zerokl init`'s presets `moe` (8 experts, 2 of a token) and `tiny`, with random
weights. A token takes the same products in both, except for the routers
(tests/engine/runs/test_expert_runs.py). The step has 8 prompts x 8 samples x 64 new tokens and one update.
Each side is a process of its own. The sides take turns step by step (by_turns.py), and ratios are taken turn
by turn. Results go to benchmarks/results/cpu/experts_step.json.
"""

import argparse
import platform
import sys
import tempfile
from pathlib import Path

import by_turns
from zerokl.benchmarks.device.runs import write_preset

SIDES, STATIONS = ("moe", "tiny"), ("step_s", "sample_s", "train_s")


def compare(args: argparse.Namespace, models: dict[str, Path], folder: Path, dtype: str) -> dict:
    """Let the sides take turns. Returns every turn, and the spread of the ratios over the turns."""
    shared = ["--turns", str(args.turns), "--threads", str(args.threads)]
    sides = {
        name: by_turns.Side(
            [sys.executable, __file__, *shared, "--side", str(model), dtype], folder / f"{dtype}_{name}.log"
        )
        for name, model in models.items()
    }
    rows = by_turns.alternate(sides, args.turns, args.warmup)
    ratios = {
        what: by_turns.spread([row["moe"][what] / row["tiny"][what] for row in rows]) for what in STATIONS
    }
    for what, spread in ratios.items():
        print(f"{dtype} {what}, moe over tiny: {by_turns.words(spread)}", flush=True)
    return {"turns": rows, "ratios": ratios}


def main() -> None:
    """Compare in both dtypes, and write the results to a file."""
    parser = by_turns.parser(__doc__, "experts_step.json")
    parser.add_argument("--threads", type=int, default=2)
    # MODEL DTYPE: this process is that side.
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        model, dtype = args.side
        from zerokl_side import take_steps

        take_steps(Path(model), dtype, args.turns, args.threads)
        return
    result = {"machine": platform.processor() or platform.machine(), "threads": args.threads}
    with tempfile.TemporaryDirectory() as folder:
        models = {name: write_preset(name, Path(folder) / name) for name in SIDES}
        for dtype in ("float32", "bfloat16"):
            result[dtype] = compare(args, models, Path(folder), dtype)
    by_turns.write(result, args.out)


if __name__ == "__main__":
    main()
