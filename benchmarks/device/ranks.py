"""Ranks: whole runs by torchrun with one and two of them, in each form, beside the run of one process.

On GPUs the ranks send by nccl, on a CPU by gloo. Two ranks need two GPUs.
"""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from zerokl.benchmarks.device.exact import FOLDER_PACKAGES, summary_of, words_of
from zerokl.benchmarks.device.runs import settings, write_model
from zerokl.benchmarks.machine import Machine, Row, name_of

# Each form's settings, and those of the run beside which it stands.
_LEAVES = ("--precision.leaves", "2")
_FORMS = {
    "replicated": ((), ()),
    "fsdp": (("--parallel.engine", "fsdp"), ()),
    "tensor": (("--parallel.tensor", "2"), _LEAVES),
    "context": (("--parallel.context", "2"), ()),
    "fsdp, tensor": (("--parallel.engine", "fsdp", "--parallel.tensor", "2"), _LEAVES),
}
_RUNS = [*itertools.product((2, 1), ("replicated", "fsdp"))] + [(2, form) for form in list(_FORMS)[2:]]


def bf16(m: Machine) -> Iterator[Row]:
    """Runs in bf16."""
    return _worlds(m, torch.bfloat16)


def fp32(m: Machine) -> Iterator[Row]:
    """Runs in fp32."""
    return _worlds(m, torch.float32)


def _worlds(m: Machine, dtype: torch.dtype) -> Iterator[Row]:
    """A run of each form with two ranks, and with one where that is another run."""
    missing = [name for name in FOLDER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        yield {"what": f"ranks: not compared ({', '.join(missing)} is missing)"}
        return
    devices = torch.cuda.device_count() if m.on_gpu else 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(m, folder, 2, 128 if m.small else 4096)
        words = words_of(settings(m, model, dtype, 2 if m.small else 4))
        alone: dict[tuple[str, ...], dict[str, object]] = {}
        for i, (ranks, form) in enumerate(_RUNS):
            what = f"{form} {name_of(dtype)}, ranks of {'nccl' if m.on_gpu else 'gloo'}: {ranks}"
            if ranks > devices:
                yield {"what": f"{what}: not compared (GPUs: {devices})"}
                continue
            spread, order = _FORMS[form]
            run = _run(m, [*words, *order, *spread], folder / f"run-{i}", ranks)
            if "refused" in run:
                yield {"what": f"{what}: not compared ({run['refused']})"}
                continue
            if order not in alone:
                alone[order] = _run(m, [*words, *order], folder / f"alone-{len(alone)}", 0)
            unequal = sum(run[key] != alone[order][key] for key in ("fingerprint", "weights"))
            yield {"what": f"{what}, beside one process", "unequal": unequal}


def _run(m: Machine, words: Sequence[str], folder: Path, ranks: int) -> dict[str, object]:
    """The summary of a run, or why it is refused. ranks: of torchrun; 0 is a process without torchrun."""
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
    refusal = re.search(r"config: (parallel|precision)\..*", process.stdout)
    return {"refused": refusal[0]} if refusal else summary_of(folder, process.stdout)


SECTIONS = (bf16, fp32)
