"""One RL step beside TRL's GRPO, sampling beside transformers.generate, and the fixed-tile linear beside plain torch.

    python benchmarks/bench_step.py --trl-python .venv-trl/bin/python      (TRL has an environment of its own)

The step: 8 prompts x 8 samples x 64 new tokens, Qwen3 with 4 layers, width 256, 8 query and 2 key-value heads of 32, MLP
512, vocabulary 128, one update. Each side is a process of its own; the sides alternate, and ratios are taken pair by pair,
so that a change of the machine's speed meets both. Results go to benchmarks/results/cpu/bench_step.json.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PROMPTS, SAMPLES, NEW_TOKENS, PROMPT_CHARS = 8, 8, 64, 16


class Letters:
    """A task without right answers: the reward is the share of one letter, so that groups differ and all samples train."""

    chat = False

    def problems(self, split):
        from zerokl.engine.tasks.base import Problem

        return [Problem(i, "".join(chr(97 + (7 * i + 3 * j) % 26) for j in range(PROMPT_CHARS)), "") for i in range(PROMPTS)]

    def reward(self, problem, completion):
        return completion.count("a") / NEW_TOKENS


def make_model(folder: Path) -> None:
    """The benchmark's model and tokenizer, in Hugging Face format."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from zerokl.engine.text import character_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
        vocab_size=128, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    letters = "".join(map(chr, range(32, 127))) + "".join(map(chr, range(0xC0, 0xC0 + 30)))
    character_tokenizer(letters).save_pretrained(folder)


def zerokl_side(model: str, dtype: str, steps: int, warmup: int, threads: int, sampler: str) -> dict:
    """Time zerokl's step in this process."""
    import torch
    from zerokl.engine.config import load_config
    from zerokl.engine.loop import train_step
    from zerokl.engine.run import make_state

    torch.set_num_threads(threads)
    values = {
        "model": model, "dtype": dtype, "prompts": PROMPTS, "samples": SAMPLES, "steps": steps + warmup, "sampling.max_tokens": NEW_TOKENS,
        "sampler": sampler,
    }  # fmt: skip
    config = load_config(None, None, {k: str(v) for k, v in values.items()})
    state = make_state(config, Path(model), Letters())
    state.text.stop_ids = frozenset()  # every completion has exactly NEW_TOKENS tokens, as on TRL's side
    step_s, sample_s = [], []
    for _ in range(steps + warmup):
        began = time.perf_counter()
        m = train_step(state).metrics
        step_s.append(time.perf_counter() - began)
        sample_s.append(m["time/sample_s"])
        assert m["mismatch/frac_equal"] == 1.0
        assert m["tokens"] == PROMPTS * SAMPLES * NEW_TOKENS
    return {"step_s": step_s[warmup:], "sample_s": sample_s[warmup:]}


def trl_side(args: argparse.Namespace, model: str, dtype: str, mode: str, scratch: Path) -> dict:
    """Time TRL's step in its own environment."""
    out = scratch / "trl.json"
    words = ["--model", model, "--dtype", dtype, "--bf16-mode", mode, "--out", str(out), *shared_words(args)]
    subprocess.run([args.trl_python, str(HERE / "trl_step.py"), *words], check=True, capture_output=True)
    return json.loads(out.read_text())


def shared_words(args: argparse.Namespace) -> list[str]:
    """Options that both sides are given."""
    return ["--steps", str(args.steps), "--warmup", str(args.warmup), "--threads", str(args.threads)]


def linear_rates(threads: int) -> list[dict]:
    """Fixed-tile linear against F.linear, interleaved: GFLOP/s of each and the ratio of times."""
    import torch
    from zerokl.kernels.order import matmul_rows

    torch.set_num_threads(threads)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for T, N, K in ((64, 1024, 256), (576, 1024, 256), (576, 256, 512), (64, 4096, 1024), (512, 4096, 1024)):
            x, w = torch.randn(T, K).to(dtype), torch.randn(N, K).to(dtype)
            times: dict[str, list[float]] = {"tiled": [], "plain": []}
            repeat = max(3, int(2e8 / (T * N * K)))
            for _ in range(9):
                for name, call in (("tiled", lambda: matmul_rows(x, w.t())), ("plain", lambda: torch.nn.functional.linear(x, w))):  # noqa: B023
                    call()
                    began = time.perf_counter()
                    for _ in range(repeat):
                        call()
                    times[name].append((time.perf_counter() - began) / repeat)
            rate = {name: 2 * T * N * K / statistics.median(t) / 1e9 for name, t in times.items()}
            ratio = statistics.median(a / b for a, b in zip(times["tiled"], times["plain"], strict=True))
            rows.append(
                {"dtype": str(dtype)[6:], "T": T, "N": N, "K": K, **{f"{k}_gflops": v for k, v in rate.items()}, "time_ratio": ratio}
            )
    return rows


def main() -> None:
    """Run all parts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="Python of an environment with trl==1.16.0; without it TRL is left out")
    parser.add_argument("--rounds", type=int, default=3, help="times the two sides alternate")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them, dropped")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sampler", choices=("native", "vllm"), default="native", help="zerokl's; vllm where this Python has it")
    parser.add_argument("--out", default=str(HERE / "results" / "cpu" / "bench_step.json"))
    parser.add_argument("--side", help=argparse.SUPPRESS)  # "DTYPE:MODEL": this process is zerokl's side
    args = parser.parse_args()
    if args.side:
        dtype, model = args.side.split(":", 1)
        print(json.dumps(zerokl_side(model, dtype, args.steps, args.warmup, args.threads, args.sampler)), flush=True)
        return
    result = {"machine": platform.processor() or platform.machine(), "python": platform.python_version(), "threads": args.threads}
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
    """Alternate the sides; medians of the rounds' medians, and ratios round by round.

    bf16 meets two TRLs: "autocast" keeps fp32 master weights as zerokl does; "pure" has bf16 weights and optimizer state.
    """
    rounds = []
    for _ in range(args.rounds):
        words = [sys.executable, __file__, "--side", f"{dtype}:{model}", "--sampler", args.sampler, *shared_words(args)]
        own = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        step_s, sample_s = statistics.median(own["step_s"]), statistics.median(own["sample_s"])
        row = {"zerokl_step_s": step_s, "zerokl_sample_s": sample_s}
        for mode in () if not args.trl_python else ("autocast", "pure") if dtype == "bfloat16" else ("pure",):
            other = trl_side(args, model, dtype, mode, scratch)
            name = f"trl_{mode}" if dtype == "bfloat16" else "trl"
            trl_s, generate_s = statistics.median(other["step_s"]), statistics.median(other["generate_alone_s"])
            row |= {f"{name}_step_s": trl_s, f"step_ratio_{name}": step_s / trl_s, f"sample_ratio_{name}": sample_s / generate_s}
            row |= {k: other[k] for k in ("trl", "transformers", "torch")}
        rounds.append(row)
    middle = {k: statistics.median(r[k] for r in rounds) for k, v in rounds[0].items() if isinstance(v, float)}
    print(f"{dtype}: " + "  ".join(f"{k} {v:.3f}" for k, v in middle.items()), flush=True)
    return {"median": middle, "rounds": rounds}


if __name__ == "__main__":
    main()
