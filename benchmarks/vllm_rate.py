"""Tokens a second of vllm-zerokl beside those of vllm as it comes: same model and requests, in one run.

    .venv-vllm/bin/python benchmarks/vllm_rate.py [--model FOLDER]

64 requests x 64 new tokens, temperature 1, logprobs of the drawn tokens. Each engine is a process of its own.
The two take turns call by call (by_turns.py), and the ratio is taken turn by turn. Results go to
benchmarks/results/cpu/vllm_rate.json.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import by_turns
from bench_step import make_model

PROMPTS, SAMPLES, NEW_TOKENS, PROMPT_TOKENS = 8, 8, 64, 16
CACHE_BYTES = 1 << 29


def requests():
    """What a call draws. No two prompts share a prefix."""
    from zerokl.benchmarks.device.engines import Requests

    prompts = [[20 + (7 * i + 3 * j) % 90 for j in range(PROMPT_TOKENS)] for i in range(PROMPTS)]
    return Requests(prompts, SAMPLES, NEW_TOKENS, cache_bytes=CACHE_BYTES)


def vllm_zerokl_calls(model: Path, dtype: str):
    """A function that draws all tokens of call i with zerokl inside vLLM, and returns their number."""
    import torch
    from zerokl.benchmarks.device.engines import vllm_zerokl

    return vllm_zerokl(model, getattr(torch, dtype), torch.device("cpu"), requests())


def vllm_calls(model: Path, dtype: str):
    """A function like that of vllm_zerokl_calls, for vLLM's own model, attention and sampler."""
    import torch
    from zerokl.benchmarks.device.engines import vllm_as_it_comes
    from zerokl.engine.rollout.vllm.sampler import prepare_vllm

    prepare_vllm(multiprocess=False)
    return vllm_as_it_comes(model, getattr(torch, dtype), requests(), enforce_eager=True)


SIDES = {"vllm-zerokl": vllm_zerokl_calls, "vllm": vllm_calls}


def serve(side: str, model: Path, dtype: str, calls: int) -> None:
    """The process of one side: one call a turn."""
    call = SIDES[side](model, dtype)
    for i in range(calls):
        by_turns.wait()
        began = time.perf_counter()
        tokens = call(i)
        by_turns.answer(rate=tokens / (time.perf_counter() - began))
        assert tokens == PROMPTS * SAMPLES * NEW_TOKENS
    os._exit(0)  # vLLM's own shutdown takes seconds


def compare(model: str, dtype: str, args: argparse.Namespace, scratch: Path) -> dict:
    """Let the sides take turns. Returns every turn, and the spread of the ratio over the turns."""
    shared = ["--turns", str(args.turns)]
    sides = {
        name: by_turns.Side(
            [sys.executable, __file__, *shared, "--side", name, dtype, model],
            scratch / f"{dtype}_{name}.log",
        )
        for name in SIDES
    }
    rows = [
        {name: answer["rate"] for name, answer in answers.items()}
        for answers in by_turns.alternate(sides, args.turns, args.warmup)
    ]
    medians = {side: statistics.median(row[side] for row in rows) for side in SIDES}
    spread = by_turns.spread([row["vllm-zerokl"] / row["vllm"] for row in rows])
    print(
        f"{dtype}: vllm-zerokl {medians['vllm-zerokl']:.0f} tokens/s, vllm {medians['vllm']:.0f}, "
        f"ratio {by_turns.words(spread)}",
        flush=True,
    )
    return {"turns": rows, "ratio": spread}


def main() -> None:
    """Compare in both dtypes, and write the results to a file."""
    parser = by_turns.parser(__doc__, "vllm_rate.json")
    parser.add_argument("--model", help="checkpoint folder; the model of bench_step.py by default")
    # SIDE DTYPE MODEL: this process is that side.
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side, dtype, model = args.side
        serve(side, Path(model), dtype, args.turns)
    result = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or make_model(Path(scratch))
        for dtype in ("float32", "bfloat16"):
            result[dtype] = compare(model, dtype, args, Path(scratch))
    by_turns.write(result, args.out)


if __name__ == "__main__":
    main()
