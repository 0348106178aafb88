"""Tokens a second of vLLM alone, in each of its modes, with the requests of decode.py."""

from collections.abc import Iterator

from zerokl.benchmarks.device.decode import rates
from zerokl.benchmarks.machine import Machine, Row

_MODES = {
    "vllm": "vLLM as it comes",
    "vllm-graphs": "vLLM as it comes, decode graphs only",
    "batch-invariant-graphs": "vLLM batch-invariant, decode graphs, Triton attention",
    "batch-invariant": "vLLM batch-invariant, eager, Triton attention",
    "vllm-eager": "vLLM as it comes, eager",
}


def vllm_decoding(m: Machine) -> Iterator[Row]:
    """The rate of each mode, the most important first."""
    return rates(m, _MODES)


SECTIONS = (vllm_decoding,)
