"""Beside vLLM: its Triton kernels, its compiled operations, and runs in which it samples.

- its Triton kernels, where its Python files are on the path: bits and rates;
- its compiled operations;
- the samplers vllm-zerokl and vllm-exact in three dtypes, bf16 also with vllm.cuda_graphs: mismatch, and the
  native sampler's weights;
- its own model beside the trainer's forward, at the widths of the 1.7B (vllm_exact.py).

All but the first need an installed vLLM. What is not there is left out with a line.
"""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from zerokl.benchmarks.device.processes import module_command, rows_of, serve
from zerokl.benchmarks.device.runs import settings, take_steps, write_model
from zerokl.benchmarks.machine import Machine, Row, name_of
from zerokl.benchmarks.peers import vllm_equality, vllm_rates

DTYPES = ("bfloat16", "float16", "float32")
_LIMIT_S = 75


def is_installed() -> bool:
    """Whether vLLM can be imported, its compiled operations too. Its Python files alone are not enough."""
    spec = find_spec("vllm")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return any(list(folder.glob("_C*.so")) for folder in folders)


# Found out here, because vllm_equality puts stand-ins for vLLM's modules into this process.
_INSTALLED = is_installed()


def compiled(m: Machine) -> Iterator[Row]:
    """vLLM's compiled operations (compiled_ops.py)."""
    if not _INSTALLED:
        yield _left_out("vLLM's compiled operations")
        return
    for _, row in rows_of(
        m, {"vLLM's compiled operations": module_command(m, "device.compiled_ops")}, _LIMIT_S
    ):
        yield row


def samplers(m: Machine) -> Iterator[Row]:
    """Runs with vLLM as the sampler, three dtypes at the same time, and bf16 with CUDA graphs."""
    for sampler in ("vllm-zerokl", "vllm-exact"):
        if not _INSTALLED:
            yield _left_out(f"sampler {sampler}")
        elif sampler == "vllm-exact" and not m.on_gpu:
            yield {"what": f"sampler {sampler}: not compared (it needs a GPU)"}
        else:
            cases = [(dtype, "eager") for dtype in DTYPES] + [(DTYPES[0], "graphs")] * m.on_gpu
            jobs = {
                f"sampler {sampler} {' '.join(case)}": module_command(m, "device.beside_vllm", sampler, *case)
                for case in cases
            }
            for _, row in rows_of(m, jobs, _LIMIT_S):
                yield row


def own_model(m: Machine) -> Iterator[Row]:
    """vLLM's own model beside the trainer's forward, three dtypes at the same time."""
    if not _INSTALLED:
        yield _left_out("vLLM's own model")
        return
    jobs = {f"vLLM's own model {dtype}": module_command(m, "vllm_exact", dtype) for dtype in DTYPES}
    for _, row in rows_of(m, jobs, _LIMIT_S):
        yield row


def _left_out(what: str) -> Row:
    return {"what": f"{what}: not compared (vLLM with its compiled operations is not installed)"}


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


# The first and the last run in this process, the others in processes of their own.
SECTIONS = (vllm_equality, compiled, samplers, own_model, vllm_rates)

if __name__ == "__main__":
    serve(_run)
