"""Seconds that Triton takes to compile what a step of a 0.6B launches, without a GPU.

    .venv-vllm/bin/python -m zerokl.benchmarks.compile_time [--threads 1 2]

A run on a GPU compiles the same binaries ahead (engine/runs/compile_ahead.py). Here they are in bf16 with
Hopper's tiles, compiled with each number of threads into an empty cache.
"""

import argparse
import os
import tempfile
import time

from zerokl.benchmarks.budget import COMPLETION, PROMPT, SAMPLES, SHARDS, VOCABULARY
from zerokl.benchmarks.machine import SHAPES, shape_config
from zerokl.engine.config.config_file import load_config
from zerokl.engine.runs.compile_ahead import compile_launches, launches_of_a_step
from zerokl.engine.runs.memory import PassSizes, RunShape
from zerokl.model.weights import Layout

TARGET = "sm_90"


def main() -> None:
    """Compile with each number of threads, and print the seconds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    overrides = {
        "dtype": "bfloat16",
        "prompts": 2 * SHARDS,
        "num_generations": SAMPLES,
        "sampling.max_tokens": COMPLETION,
    }
    config = load_config(None, "demo", {name: str(value) for name, value in overrides.items()})
    layout = Layout(shape_config(SHAPES["0.6B"], VOCABULARY, 0, True))
    shape, sizes = RunShape(config, layout, prompt_tokens=PROMPT), PassSizes(SHARDS * SAMPLES, SHARDS, SHARDS)
    began = time.perf_counter()
    launches = launches_of_a_step(shape, sizes, TARGET)
    print(f"{len(launches)} binaries for {TARGET}, listed in {time.perf_counter() - began:.1f} s")
    for threads in args.threads:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            began, before = time.perf_counter(), os.times()
            compile_launches(launches, TARGET, threads)
            after = os.times()
            cpu_s = sum(after[:4]) - sum(before[:4])
            print(f"{threads} threads: {time.perf_counter() - began:.1f} s, {cpu_s:.1f} s of the CPU")


if __name__ == "__main__":
    main()
