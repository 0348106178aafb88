"""The most memory that a rank has, measured beside the prediction, by engine and number of ranks.

    python benchmarks/rank_memory.py [--engines replicated fsdp] [--ranks 1 2 4] [--dtype bfloat16]

The model has the layers of SmolLM2-135M with random weights and a small vocabulary, 106 million weights. Each
row is two steps by torchrun. A thread of each rank looks every 5 ms how much memory is its own (RssAnon and
RssShmem; pages of files can be dropped). The peak of a rank with a model of one small layer is taken off:
Python, torch and the buffers that no weight decides. The prediction is engine/runs/memory.py's, without the
workspace of a GPU's logits. Rank 0 writes the checkpoint at the end, so its peak has a column of its own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from zerokl.benchmarks.device.runs import write_decoder
from zerokl.benchmarks.machine import Machine, model_config

_PEAK = """
import atexit, os, sys, threading, time
peak = 0
def look():
    global peak
    while True:
        lines = [line.split() for line in open("/proc/self/status")]
        peak = max(peak, sum(int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:")))
        time.sleep(0.005)
def write():
    with open(os.path.join(os.environ["PEAKS"], os.environ["RANK"]), "w") as out:
        out.write(str(peak))
if "-m" in sys.orig_argv and "RANK" in os.environ:  # a rank; not torchrun
    threading.Thread(target=look, daemon=True).start()
    atexit.register(write)
"""
# Widths and layers, as machine.model_config has them.
MODELS = {"large": ((576, 1536, 9, 3, 64), 30), "small": ((64, 128, 2, 1, 32), 1)}
_MIB = 1 << 20


def settings(dtype: str, engine: str) -> dict[str, str]:
    """Of every row: short completions, so that weights and their state are most of it."""
    return {
        "dtype": dtype,
        "parallel.engine": engine,
        "workers": "1",
        "threads": "1",
        "steps": "2",
        "prompts": "8",
        "num_generations": "2",
        "micro_batch": "1",
        "virtual_shards": "8",
        "sampling.max_tokens": "4",
        "task.name": "zerokl.benchmarks.letters:Letters",
    }


def peaks(folder: Path, model: str, ranks: int, values: dict[str, str]) -> list[float]:
    """MiB of each rank of a run of its own. Raises SystemExit where the run fails."""
    place = Path(tempfile.mkdtemp(dir=folder))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *torchrun, "-m", "zerokl", "train", "--run_dir", str(place / "run")]
    for key, value in (values | {"model": str(folder / model / "model")}).items():
        command += [f"--{key}", value]
    environment = os.environ | {"PYTHONPATH": str(folder), "PEAKS": str(place)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        words = " ".join(command)
        raise SystemExit(f"{words} ended with {process.returncode}:\n{process.stderr[:2000]}")
    return [int((place / str(rank)).read_text()) / 1024 for rank in range(ranks)]


def predicted(folder: Path, ranks: int, values: dict[str, str]) -> float:
    """MiB of a rank, by what the run itself predicts."""
    from zerokl.benchmarks.letters import Letters
    from zerokl.engine.config.config_file import load_config
    from zerokl.engine.runs.memory import RunShape, fit, footprint
    from zerokl.model.config import ModelConfig
    from zerokl.model.weights import Layout

    large = folder / "large" / "model"
    config = load_config(None, None, values | {"model": str(large)})
    layout = Layout(ModelConfig.from_file(large))
    longest = max(len(problem.prompt) for problem in Letters().problems("train"))
    run = RunShape(config, layout, ranks, longest)
    sizes = fit(run, torch.device("cpu"))
    return sum(footprint(run, sizes, 1 << 40)._replace(logits=0)) / _MIB


def main() -> None:
    """Print a row for each engine and number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engines", nargs="+", default=["replicated", "fsdp"])
    args = parser.parse_args()
    print("| engine | ranks | predicted, MiB | measured, MiB | rank 0, MiB |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_PEAK)  # Python runs it when it starts
        for model, (widths, layers) in MODELS.items():
            config = model_config("Qwen3", *widths, layers=layers, vocab=128)
            write_decoder(Machine("cpu", small=False).random_decoder(config, torch.float32), folder / model)
        for engine in args.engines:
            values = settings(args.dtype, engine)
            for ranks in args.ranks:
                large, small = (peaks(folder, model, ranks, values) for model in ("large", "small"))
                differences = [a - b for a, b in zip(large, small, strict=True)]
                others = f"{max(differences[1:]):,.0f}" if ranks > 1 else ""
                expected = predicted(folder, ranks, values)
                print(
                    f"| {engine} | {ranks} | {expected:,.0f} | {others} | {differences[0]:,.0f} |", flush=True
                )


if __name__ == "__main__":
    main()
