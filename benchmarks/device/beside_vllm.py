"""Beside vLLM's operations: its Triton kernels, bits and rates, and its compiled operations.

The former need its Python files alone. What is not there is left out with a line.
"""

from collections.abc import Iterator

from zerokl.benchmarks.device.installed import has_vllm, without_vllm
from zerokl.benchmarks.device.processes import module_command, rows_of
from zerokl.benchmarks.machine import Machine, Row
from zerokl.benchmarks.peers import vllm_equality, vllm_rates

_LIMIT_S = 75


def compiled(m: Machine) -> Iterator[Row]:
    """vLLM's compiled operations (compiled_ops.py)."""
    if not has_vllm():
        yield without_vllm("vLLM's compiled operations")
        return
    job = module_command(m, "device.compiled_ops")
    yield from rows_of(m, {"vLLM's compiled operations": job}, _LIMIT_S)


SECTIONS = (vllm_equality, compiled, vllm_rates)
