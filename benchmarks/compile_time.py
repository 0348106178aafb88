"""Seconds that Triton takes to compile what a 0.6B's pass and decoding turn launch, without a GPU.

    .venv-vllm/bin/python -m zerokl.benchmarks.compile_time [--threads 1 2] [--layers 2]

The launches are those of benchmarks/budget.py, in bf16 with Hopper's tiles. Their binaries are compiled with
each number of threads of one process, into an empty cache. LLVM and ptxas hold no lock of Python's.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from zerokl.benchmarks import budget
from zerokl.kernels import backend
from zerokl.kernels.launch import Launch, recorded_launches
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.tiles import tiles_of_target
from zerokl.verify.binaries import compile_launch, specialised

TARGET = "sm_90"


def launches_of(work: Callable[[], object]) -> list[Launch]:
    """What `work` launches, with tensors that have no memory."""
    with recorded_launches() as launches, budget.HostWork():
        work()
    return launches


def binaries_of_a_run(layers: int) -> list[Launch]:
    """A launch for each binary of a pass and of decoding turns."""
    decoder = budget.decoder_of("0.6B", layers)
    with tiles_of_target(TARGET):
        launches = launches_of(budget.training_pass(decoder))
        with torch.no_grad():
            rows = budget.decoding(decoder, SamplingParams())
            launches += launches_of(lambda: rows._turn(budget.ROWS))
    keys = {}
    for launch in launches:
        source, parsed, _ = specialised(*launch, TARGET)
        keys[source.hash(), parsed.hash()] = launch
    return list(keys.values())


def main() -> None:
    """Compile with each number of threads, and print the seconds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=2, help="of the model; two layers launch all kernels")
    args = parser.parse_args()
    backend.INTERPRETED = True  # tensors without memory take the GPU's way
    launches = binaries_of_a_run(args.layers)
    print(f"{len(launches)} binaries for {TARGET}")
    for threads in args.threads:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            began, before = time.perf_counter(), os.times()
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda launch: compile_launch(*launch, TARGET), launches))
            after = os.times()
            cpu_s = sum(after[:4]) - sum(before[:4])
            print(f"{threads} threads: {time.perf_counter() - began:.1f} s, {cpu_s:.1f} s of the CPU")


if __name__ == "__main__":
    main()
