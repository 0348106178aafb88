"""A step of a mixture of experts beside a step of a dense model in which a token takes as many products.

    .venv/bin/python benchmarks/experts_step.py

The models are those of `zerokl init`'s presets `moe` (8 experts, 2 of a token) and `tiny`, with random
weights. A token takes the same products in both, except for the routers
(tests/engine/runs/test_expert_runs.py). The step has 8 prompts x 8 samples x 64 new tokens and one update.
Each side is a process of its own. The sides take turns step by step (by_turns.py), and ratios are taken turn
by turn. Results go to benchmarks/results/cpu/experts_step.json.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import by_turns
from letters import Letters
from random_models import make_model

HERE = Path(__file__).parent
SIDES, STATIONS = ("moe", "tiny"), ("step_s", "sample_s", "train_s")
PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 64


def serve(args: argparse.Namespace, model: Path, dtype: str) -> None:
    """The process of one side: one step a turn."""
    import torch
    from zerokl.engine.config.config_file import load_config
    from zerokl.engine.runs.setup import make_state
    from zerokl.engine.tasks.rewards import Reward
    from zerokl.engine.train.step import train_step

    torch.set_num_threads(args.threads)
    values = {
        "model": str(model),
        "dtype": dtype,
        "prompts": PROMPTS,
        "num_generations": SAMPLES,
        "steps": args.turns,
        "sampling.max_tokens": NEW_TOKENS,
    }
    config = load_config(None, None, {k: str(v) for k, v in values.items()})
    task = Letters()
    state = make_state(config, model, task, Reward(task.reward))
    state.tokenizer.stop_ids = frozenset()  # every completion has exactly NEW_TOKENS tokens
    for _ in range(args.turns):
        by_turns.wait()
        began = time.perf_counter()
        metrics = train_step(state).metrics
        seconds = time.perf_counter() - began
        by_turns.answer(
            step_s=seconds, sample_s=metrics["time/sample_s"], train_s=seconds - metrics["time/sample_s"]
        )
        assert metrics["mismatch/frac_equal"] == 1.0
        assert metrics["tokens"] == PROMPTS * SAMPLES * NEW_TOKENS
    state.close()


def compare(args: argparse.Namespace, folder: Path, dtype: str) -> dict:
    """Let the sides take turns. Returns every turn, and the spread of the ratios over the turns."""
    shared = ["--turns", str(args.turns), "--threads", str(args.threads)]
    sides = {
        name: by_turns.Side(
            [sys.executable, __file__, *shared, "--side", str(folder / name), dtype],
            folder / f"{dtype}_{name}.log",
        )
        for name in SIDES
    }
    rows = by_turns.alternate(sides, args.turns, args.warmup)
    ratios = {
        what: by_turns.spread([row["moe"][what] / row["tiny"][what] for row in rows]) for what in STATIONS
    }
    for what, spread in ratios.items():
        print(
            f"{dtype} {what}, moe over tiny: {spread['median']:.2f} "
            f"({spread['p10']:.2f} to {spread['p90']:.2f})",
            flush=True,
        )
    return {"turns": rows, "ratios": ratios}


def main() -> None:
    """Compare in both dtypes, and write the results to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=33, help="steps of each side")
    parser.add_argument("--warmup", type=int, default=3, help="steps at the beginning that are dropped")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default=str(HERE / "results" / "cpu" / "experts_step.json"))
    # MODEL DTYPE: this process is that side.
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        model, dtype = args.side
        serve(args, Path(model), dtype)
        return
    result = {"machine": platform.processor() or platform.machine(), "threads": args.threads}
    with tempfile.TemporaryDirectory() as folder:
        for name in SIDES:
            make_model(name, Path(folder))
        for dtype in ("float32", "bfloat16"):
            result[dtype] = compare(args, Path(folder), dtype)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
