"""One RL step beside TRL's GRPO, sampling beside transformers.generate, and our linear beside plain torch.

    python benchmarks/bench_step.py --trl-python .venv-trl/bin/python      (TRL has an environment of its own)

The step: 8 prompts x 8 samples x 64 new tokens, Qwen3 with 4 layers, width 256, 8 query and 2 key-value heads
of 32, MLP 512, vocabulary 128, one update. Each side is a process of its own. The sides take turns step by
step (by_turns.py), and ratios are taken turn by turn. So a change of the machine's speed meets all sides.
Results go to benchmarks/results/cpu/bench_step.json.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import by_turns

HERE = Path(__file__).parent


def make_model(folder: Path, positions: int = 512) -> str:
    """Write the benchmark's model, with random weights, and a tokenizer. Returns the model's folder."""
    import torch
    from zerokl.benchmarks.device.runs import write_decoder
    from zerokl.benchmarks.machine import Machine, model_config

    config = model_config("Qwen3", 256, 512, 8, 2, 32, layers=4, vocab=128, context=positions)
    return str(write_decoder(Machine("cpu", small=False).random_decoder(config, torch.float32), folder))


def sides(args: argparse.Namespace, model: str, dtype: str, scratch: Path) -> dict[str, by_turns.Side]:
    """zerokl; and for each mode of TRL its training, and its generate alone.

    In bf16 TRL has two modes: "autocast" keeps fp32 master weights as zerokl does, and "pure" has weights and
    optimizer state in bf16.
    """
    shared = ["--turns", str(args.turns), "--threads", str(args.threads)]
    commands = {
        "zerokl": [sys.executable, __file__, "--side", f"{dtype}:{model}", "--sampler", args.sampler, *shared]
    }
    for mode in ("autocast", "pure") if dtype == "bfloat16" else ("pure",):
        trl = [
            args.trl_python,
            str(HERE / "trl_step.py"),
            "--model",
            model,
            "--dtype",
            dtype,
            "--bf16-mode",
            mode,
            *shared,
        ]
        name = f"trl_{mode}" if dtype == "bfloat16" else "trl"
        if args.trl_python:
            commands |= {name: trl, f"{name}_generate": [*trl, "--what", "generate"]}
    return {
        name: by_turns.Side(command, scratch / f"{dtype}_{name}.log") for name, command in commands.items()
    }


def linear_rates(threads: int) -> list[dict]:
    """Our fixed-tile linear beside F.linear: GFLOP/s of each, and the ratio of times."""
    import torch

    torch.set_num_threads(threads)
    shapes = ((64, 1024, 256), (576, 1024, 256), (576, 256, 512), (64, 4096, 1024), (512, 4096, 1024))
    return [_linear_rate(dtype, *shape) for dtype in (torch.float32, torch.bfloat16) for shape in shapes]


def _linear_rate(dtype, T: int, N: int, K: int) -> dict:
    """The two linears alternate; medians of their times."""
    import torch
    from zerokl.kernels.matmul import matmul

    x, w = torch.randn(T, K).to(dtype), torch.randn(N, K).to(dtype)
    calls = {"tiled": lambda: matmul(x, w), "plain": lambda: torch.nn.functional.linear(x, w)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeat = max(3, int(2e8 / (T * N * K)))
    for _ in range(9):
        for name, call in calls.items():
            call()
            began = time.perf_counter()
            for _ in range(repeat):
                call()
            times[name].append((time.perf_counter() - began) / repeat)
    rates = {f"{name}_gflops": 2 * T * N * K / statistics.median(t) / 1e9 for name, t in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times["tiled"], times["plain"], strict=True))
    return {"dtype": str(dtype)[6:], "T": T, "N": N, "K": K, **rates, "time_ratio": ratio}


def main() -> None:
    """Run all parts, print their figures, and write them to a file."""
    parser = by_turns.parser(__doc__, "bench_step.json")
    parser.add_argument(
        "--trl-python", help="Python of an environment with trl==1.16.0; without it TRL is left out"
    )
    parser.add_argument("--threads", type=int, default=2)
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument(
        "--sampler",
        choices=("native", "vllm-zerokl"),
        default="native",
        help="zerokl's sampler; vllm-zerokl where this Python has it",
    )
    # DTYPE:MODEL: this process is zerokl's side.
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        dtype, model = args.side.split(":", 1)
        from zerokl_side import take_steps

        take_steps(Path(model), dtype, args.turns, args.threads, sampler=args.sampler)
        return
    import torch
    from zerokl.benchmarks.engine_pairs import machine

    result = {
        "machine": machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": args.threads,
    }
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch))
        for dtype in args.dtypes:
            result[dtype] = compare(args, model, dtype, Path(scratch))
    result["linear"] = linear_rates(args.threads)
    line = (
        "linear {dtype} T={T} N={N} K={K}: tiled {tiled_gflops:.0f} GFLOP/s, "
        "plain {plain_gflops:.0f}, time x{time_ratio:.2f}"
    )
    for row in result["linear"]:
        print(line.format(**row))
    by_turns.write(result, args.out)


def compare(args: argparse.Namespace, model: str, dtype: str, scratch: Path) -> dict:
    """Let the sides take turns. Returns every turn, and the spread of seconds and ratios over the turns."""
    alternated = by_turns.alternate(sides(args, model, dtype, scratch), args.turns, args.warmup)
    rows = [_row(answers) for answers in alternated]
    spread = {
        key: by_turns.spread([row[key] for row in rows])
        for key, value in rows[0].items()
        if isinstance(value, float)
    }
    for key, value in spread.items():
        print(f"{dtype} {key}: {value['median']:.3f} ({value['p10']:.3f} to {value['p90']:.3f})", flush=True)
    return {"spread": spread, "turns": rows}


def _row(answers: dict[str, dict]) -> dict:
    """One turn of every side: its seconds, and zerokl's time divided by the time of each other side."""
    zerokl = answers.pop("zerokl")
    row = {"zerokl_step_s": zerokl["step_s"], "zerokl_sample_s": zerokl["sample_s"]}
    for name, answer in answers.items():
        what = "generate" if "generate_s" in answer else "step"
        row[f"{name}_s" if what == "generate" else f"{name}_step_s"] = answer[f"{what}_s"]
        row[f"ratio_{name}"] = zerokl["sample_s" if what == "generate" else "step_s"] / answer[f"{what}_s"]
        row |= {key: value for key, value in answer.items() if isinstance(value, str)}
    return row


if __name__ == "__main__":
    main()
