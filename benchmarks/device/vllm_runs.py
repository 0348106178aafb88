"""Runs in which vLLM samples.

- the samplers vllm-zerokl and vllm-exact in three dtypes, bf16 also with vllm.cuda_graphs: mismatch, and the
  native sampler's weights;
- vLLM's own model beside the trainer's forward, at the widths of the 1.7B (vllm_exact.py).

All need an installed vLLM. They run at the same time, each in a process of its own.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from zerokl.benchmarks.device.installed import has_vllm, without_vllm
from zerokl.benchmarks.device.processes import module_command, rows_of, serve
from zerokl.benchmarks.device.runs import settings, take_steps, write_model
from zerokl.benchmarks.machine import Machine, Row, name_of

DTYPES = ("bfloat16", "float16", "float32")
_SAMPLERS = ("vllm-zerokl", "vllm-exact")


def vllm_runs(m: Machine) -> Iterator[Row]:
    """Runs with each sampler, and vLLM's own model."""
    if not has_vllm():
        yield without_vllm("runs in which vLLM samples")
        return
    jobs = {}
    for sampler in _SAMPLERS if m.on_gpu else _SAMPLERS[:1]:  # vllm-exact needs a GPU
        for case in [(dtype, "eager") for dtype in DTYPES] + [(DTYPES[0], "graphs")] * m.on_gpu:
            command = module_command(m, "device.vllm_runs", sampler, *case)
            jobs[f"sampler {sampler} {' '.join(case)}"] = command
    for dtype in DTYPES:
        jobs[f"vLLM's own model {dtype}"] = module_command(m, "vllm_exact", dtype)
    yield from rows_of(m, jobs, m.left_s())


def _run(m: Machine, sampler: str, dtype_name: str, mode: str) -> Iterator[Row]:
    """In a process of its own: a run with this sampler beside a run with the native one."""
    dtype = getattr(torch, dtype_name)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(m, Path(folder), 2, 128 if m.small else 4096)
        values = settings(m, model, dtype, 2 if m.small else 8)
        changed = {"sampler": sampler, "vllm": values["vllm"] | {"cuda_graphs": mode == "graphs"}}
        native, other = take_steps(values), take_steps(values | changed)
    what = f"sampler {sampler} {name_of(dtype)} {mode}"
    yield {"what": f"{what}: {other.tokens} tokens, trainer against sampler", "unequal": other.unequal}
    unequal = int(other.weights != native.weights)
    yield {"what": f"{what}: weights that are not the native sampler's", "unequal": unequal}
    if sampler == "vllm-zerokl":
        unequal = int(other.fingerprint != native.fingerprint)
        yield {"what": f"{what}: a fingerprint that is not the native sampler's", "unequal": unequal}


SECTIONS = (vllm_runs,)

if __name__ == "__main__":
    serve(_run)
