"""Ranks: whole runs by torchrun with one and two of them, each engine, beside the run of one process.

On GPUs the ranks send by nccl, on a CPU by gloo. Two ranks need two GPUs.
"""

import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from zerokl.benchmarks.device.exact import FOLDER_PACKAGES, summary_of, words_of
from zerokl.benchmarks.device.runs import settings, write_model
from zerokl.benchmarks.machine import Machine, Row, name_of

_ENGINES = ("replicated", "fsdp")
_WORLDS = (2, 1)


def bf16(m: Machine) -> Iterator[Row]:
    """Runs in bf16."""
    return _worlds(m, torch.bfloat16)


def fp32(m: Machine) -> Iterator[Row]:
    """Runs in fp32."""
    return _worlds(m, torch.float32)


def _worlds(m: Machine, dtype: torch.dtype) -> Iterator[Row]:
    """A run of each engine with two ranks and with one."""
    missing = [name for name in FOLDER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        yield {"what": f"ranks: not compared ({', '.join(missing)} is missing)"}
        return
    devices = torch.cuda.device_count() if m.on_gpu else max(_WORLDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(m, folder, 2, 128 if m.small else 4096)
        words = words_of(settings(m, model, dtype, 2 if m.small else 4))
        alone = _run(m, words, folder / "alone", 0)
        for ranks, engine in itertools.product(_WORLDS, _ENGINES):
            what = f"{engine} {name_of(dtype)}, ranks of {'nccl' if m.on_gpu else 'gloo'}: {ranks}"
            if ranks > devices:
                yield {"what": f"{what}: not compared (GPUs: {devices})"}
                continue
            run = _run(m, [*words, "--parallel.engine", engine], folder / f"{engine}-{ranks}", ranks)
            unequal = sum(run[key] != alone[key] for key in ("fingerprint", "weights"))
            yield {"what": f"{what}, beside one process", "unequal": unequal}


def _run(m: Machine, words: Sequence[str], folder: Path, ranks: int) -> dict[str, object]:
    """The summary of a run. ranks: of torchrun; 0 is a process without torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # -P is not handed on by torchrun: in the repository, its ranks would import our `kernels` for another.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, *(torchrun if ranks else ()), "-m", "zerokl", "train", *words]
    process = subprocess.run(
        [*command, "--run_dir", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=m.left_s(),
        check=False,
    )
    return summary_of(folder, process.stdout)


SECTIONS = (bf16, fp32)
