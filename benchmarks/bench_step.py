"""One RL step beside TRL's GRPO, sampling beside transformers.generate, and the fixed-tile linear beside
plain torch.

    python benchmarks/bench_step.py --trl-python .venv-trl/bin/python      (TRL has an environment of its own)

The step: 8 prompts x 8 samples x 64 new tokens, Qwen3 with 4 layers, width 256, 8 query and 2 key-value heads
of 32, MLP 512, vocabulary 128, one update. Each side is a process of its own; the sides take turns step by
step (turns.py), and ratios are taken turn by turn, so that a change of the machine's speed meets both.
Results go to benchmarks/results/cpu/bench_step.json.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import turns

HERE = Path(__file__).parent
PROMPTS, SAMPLES, NEW_TOKENS, PROMPT_CHARS = 8, 8, 64, 16


class Letters:
    """A task without right answers:

    the reward is the share of one letter, so that groups differ and all samples train.
    """

    chat = False

    def problems(self, split):
        from zerokl.engine.tasks.base import Problem

        return [
            Problem(i, "".join(chr(97 + (7 * i + 3 * j) % 26) for j in range(PROMPT_CHARS)), "")
            for i in range(PROMPTS)
        ]

    def reward(self, problem, completion):
        return completion.count("a") / NEW_TOKENS


def make_model(folder: Path) -> None:
    """The benchmark's model and tokenizer, in Hugging Face format."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from zerokl.engine.tasks.tokenizer import character_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    letters = "".join(map(chr, range(32, 127))) + "".join(map(chr, range(0xC0, 0xC0 + 30)))
    character_tokenizer(letters).save_pretrained(folder)


def zerokl_side(args: argparse.Namespace, model: str, dtype: str) -> None:
    """zerokl's steps in this process, one a turn."""
    import torch
    from zerokl.engine.config_file import load_config
    from zerokl.engine.runs.setup import make_state
    from zerokl.engine.train.step import train_step

    torch.set_num_threads(args.threads)
    values = {
        "model": model,
        "dtype": dtype,
        "prompts": PROMPTS,
        "num_generations": SAMPLES,
        "steps": args.turns,
        "sampling.max_tokens": NEW_TOKENS,
        "sampler": args.sampler,
    }
    config = load_config(None, None, {k: str(v) for k, v in values.items()})
    state = make_state(config, Path(model), Letters())
    state.tokenizer.stop_ids = frozenset()  # every completion has exactly NEW_TOKENS tokens, as on TRL's side
    for _ in range(args.turns):
        turns.wait()
        began = time.perf_counter()
        m = train_step(state).metrics
        turns.answer(step_s=time.perf_counter() - began, sample_s=m["time/sample_s"])
        assert m["mismatch/frac_equal"] == 1.0
        assert m["tokens"] == PROMPTS * SAMPLES * NEW_TOKENS


def sides(args: argparse.Namespace, model: str, dtype: str, scratch: Path) -> dict[str, turns.Side]:
    """zerokl, and of each TRL its training and its generate alone.

    bf16 meets two TRLs: "autocast" keeps fp32 master weights as zerokl does; "pure" has bf16 weights and
    optimizer state.
    """
    shared = ["--turns", str(args.turns), "--threads", str(args.threads)]
    words = {
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
        words |= {name: trl, f"{name}_generate": [*trl, "--what", "generate"]} if args.trl_python else {}
    return {name: turns.Side(own, scratch / f"{dtype}_{name}.log") for name, own in words.items()}


def linear_rates(threads: int) -> list[dict]:
    """Fixed-tile linear against F.linear, interleaved: GFLOP/s of each and the ratio of times."""
    import torch
    from zerokl.kernels.matmul import matmul

    torch.set_num_threads(threads)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for T, N, K in (
            (64, 1024, 256),
            (576, 1024, 256),
            (576, 256, 512),
            (64, 4096, 1024),
            (512, 4096, 1024),
        ):
            x, w = torch.randn(T, K).to(dtype), torch.randn(N, K).to(dtype)
            times: dict[str, list[float]] = {"tiled": [], "plain": []}
            repeat = max(3, int(2e8 / (T * N * K)))
            for _ in range(9):
                for name, call in (
                    ("tiled", lambda: matmul(x, w)),
                    ("plain", lambda: torch.nn.functional.linear(x, w)),
                ):
                    call()
                    began = time.perf_counter()
                    for _ in range(repeat):
                        call()
                    times[name].append((time.perf_counter() - began) / repeat)
            rate = {name: 2 * T * N * K / statistics.median(t) / 1e9 for name, t in times.items()}
            ratio = statistics.median(a / b for a, b in zip(times["tiled"], times["plain"], strict=True))
            rows.append(
                {
                    "dtype": str(dtype)[6:],
                    "T": T,
                    "N": N,
                    "K": K,
                    **{f"{k}_gflops": v for k, v in rate.items()},
                    "time_ratio": ratio,
                }
            )
    return rows


def main() -> None:
    """Run all parts and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl-python", help="Python of an environment with trl==1.16.0; without it TRL is left out"
    )
    parser.add_argument("--turns", type=int, default=33, help="steps of each side")
    parser.add_argument("--warmup", type=int, default=3, help="of them, the first ones, which are dropped")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--sampler",
        choices=("native", "vllm"),
        default="native",
        help="zerokl's; vllm where this Python has it",
    )
    parser.add_argument("--out", default=str(HERE / "results" / "cpu" / "bench_step.json"))
    parser.add_argument("--side", help=argparse.SUPPRESS)  # "DTYPE:MODEL": this process is zerokl's side
    args = parser.parse_args()
    if args.side:
        dtype, model = args.side.split(":", 1)
        zerokl_side(args, model, dtype)
        return
    result = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "threads": args.threads,
    }
    with tempfile.TemporaryDirectory() as scratch:
        model = str(Path(scratch) / "model")
        make_model(Path(model))
        for dtype in ("float32", "bfloat16"):
            result[dtype] = compare(args, model, dtype, Path(scratch))
    result["linear"] = linear_rates(args.threads)
    for row in result["linear"]:
        print(
            "linear {dtype} T={T} N={N} K={K}: tiled {tiled_gflops:.0f} GFLOP/s, plain {plain_gflops:.0f}, time x{time_ratio:.2f}".format(
                **row
            )
        )
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


def compare(args: argparse.Namespace, model: str, dtype: str, scratch: Path) -> dict:
    """Let the sides take turns; medians over the turns, of seconds and of each turn's ratios."""
    rows = [
        _row(told) for told in turns.alternate(sides(args, model, dtype, scratch), args.turns, args.warmup)
    ]
    spread = {
        key: turns.spread([row[key] for row in rows])
        for key, value in rows[0].items()
        if isinstance(value, float)
    }
    for key, value in spread.items():
        print(f"{dtype} {key}: {value['median']:.3f} ({value['p10']:.3f} to {value['p90']:.3f})", flush=True)
    return {"spread": spread, "turns": rows}


def _row(told: dict[str, dict]) -> dict:
    """One turn of every side, and zerokl's time over that of the others."""
    own = told.pop("zerokl")
    row = {"zerokl_step_s": own["step_s"], "zerokl_sample_s": own["sample_s"]}
    for name, other in told.items():
        what = "generate" if "generate_s" in other else "step"
        row[f"{name}_s" if what == "generate" else f"{name}_step_s"] = other[f"{what}_s"]
        row[f"ratio_{name}"] = own["sample_s" if what == "generate" else "step_s"] / other[f"{what}_s"]
        row |= {key: value for key, value in other.items() if isinstance(value, str)}
    return row


if __name__ == "__main__":
    main()
