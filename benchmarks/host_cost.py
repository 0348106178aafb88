"""What the host takes of a pass on a GPU, measured without a GPU: a driver that launches nothing.

    .venv-vllm/bin/python -m zerokl.benchmarks.host_cost

Everything but the driver is as on an H100: Triton compiles for sm_90, finds the binary of each launch, and
hands it over. The tiles are those of thousands of tokens. But the tokens are few and the widths are small, so
that torch's own operations on the CPU take little. By turns, `launch` keeps the binaries that it has found,
and does not. The C code of a launch is not in the figures.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from zerokl.benchmarks.machine import model_config
from zerokl.kernels import backend, embedding, launch, tiles
from zerokl.kernels.grad import GradBuffer, PendingSums
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.tiles import tiles_of_target
from zerokl.model.decoder import COMPUTE, Decoder
from zerokl.model.scoring import logprobs, pack
from zerokl.model.weights import Layout

LAYERS = 28  # Qwen3-0.6B's


class Driver:
    """Triton's driver of a GPU that is not there.

    launched: how many launches there would have been. calls: what would have been launched, in order, if
    `keep_calls`. Many calls that are kept make Python's garbage collector run more often.
    """

    class _Utilities:
        def __init__(self) -> None:
            self.binaries: dict[bytes, int] = {}

        def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
            number = self.binaries.setdefault(binary, len(self.binaries))
            return 0, number, 0, 0, 1024  # module, function, registers, spills, threads

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32}

        def unload_module(self, module: int) -> None:
            pass

    def __init__(self, keep_calls: bool):
        self.utils, self.keep_calls = Driver._Utilities(), keep_calls
        self.launched, self.calls = 0, []

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launcher(*args: Any) -> None:
            self.launched += 1
            if self.keep_calls:
                self.calls.append(args)

        return launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def gpu_code_on_cpu() -> None:
    """Let this process take the GPU's way with tensors on the CPU, where its kernels are not carried out."""
    backend.INTERPRETED = True
    # Nothing is computed, so ids that were drawn are no ids. The embedding's forward is torch's.
    embedding.check_ids = lambda *_: None
    embedding.embedding_ref = lambda ids, w: w.new_empty(len(ids), w.shape[1])


def pretend(keep_calls: bool) -> Driver:
    """Let this process compile and launch for a GPU on the CPU's memory. TRITON_INTERPRET must be unset.

    Products of a few rows are launched as those of many.
    """
    gpu_code_on_cpu()
    tiles._TMA_MIN_TILES = 1
    driver.set_active(active := Driver(keep_calls))
    return active


def one_pass(layers: int, pairs: list[tuple[list[int], list[int]]]) -> Callable[[], None]:
    """A forward and backward of a Qwen3 of small width, with gradient buffers.

    pairs: the ids of prompts and completions.
    """
    config = model_config("Qwen3", 128, 256, 2, 1, 128, layers=layers, vocab=1024, context=1024)
    layout = Layout(config)
    model = Decoder(config, torch.zeros(layout.numel, dtype=torch.bfloat16), layout, COMPUTE)
    pending = PendingSums()  # as in engine/train/parallel/gradient.py
    buffers = {
        w: GradBuffer(torch.zeros(1, *w.shape), pending=pending if w.dim() == 1 else None)
        for w in (*model.w.values(), model.lm_head)
    }
    batch = pack(pairs)

    def run() -> None:
        logprobs(model, batch, SamplingParams(), buffers=buffers)[0].sum().backward()
        pending.finish()

    return run


class Forgetful(dict):
    """Handles that are never kept: every launch goes the way of the first."""

    def __setitem__(self, kind: Any, handle: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--turns", type=int, default=61)
    options = parser.parse_args()
    torch.set_num_threads(1)
    active, run = pretend(keep_calls=False), one_pass(options.layers, [([3], [7, 7])] * 2)
    ways = {"binaries kept": launch._handles, "each found by Triton": Forgetful()}
    milliseconds: dict[str, list[float]] = {way: [] for way in ways}
    with tiles_of_target("sm_90"):
        for turn in range(options.turns + 1):  # the first compiles
            for way, handles in ways.items():
                launch._handles = handles
                active.launched = 0
                began = time.perf_counter()
                run()
                if turn:
                    milliseconds[way].append(1000 * (time.perf_counter() - began))
    ratios = sorted(kept / searched for kept, searched in zip(*milliseconds.values(), strict=True))
    report = {
        "what": f"host time of a pass of {options.layers} layers, {active.launched} launches",
        "triton": triton.__version__,
        "torch": torch.__version__,
        "ms": {way: round(statistics.median(turns), 1) for way, turns in milliseconds.items()},
        "ratio of a turn": round(statistics.median(ratios), 3),
        "quarters": [round(ratios[len(ratios) * i // 4], 3) for i in (1, 3)],
        "turns": {way: [round(x, 1) for x in turns] for way, turns in milliseconds.items()},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
