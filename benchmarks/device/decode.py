"""Tokens a second of the samplers native, vllm-zerokl and vllm-exact.

64 samples, prompts of 128 tokens, 256 new tokens, the widths of Qwen3-0.6B, random weights, bf16. Each engine
has a process of its own. The first call compiles and is dropped.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from zerokl.benchmarks.device.engines import Requests, make
from zerokl.benchmarks.device.processes import module_command, rows_of, serve
from zerokl.benchmarks.device.runs import write_model
from zerokl.benchmarks.machine import Machine, Row

_CALLS = 4
_LIMIT_S = 110
_OURS = {
    "native": "zerokl, native sampler",
    "vllm-zerokl-ahead": "zerokl inside vLLM, decode graphs, scheduled ahead",
    "vllm-zerokl-graphs": "zerokl inside vLLM, decode graphs",
    "vllm-exact-graphs": "vLLM's own model with zerokl's draw, decode graphs",
    "vllm-zerokl": "zerokl inside vLLM",
    "vllm-exact": "vLLM's own model with zerokl's draw",
}
# These run on a CPU as well, where vLLM is a build for CPUs.
_ON_A_CPU = ("native", "vllm-zerokl", "vllm-eager")
# Tokens a second on an H100. A graph of prototypes made 27,000 to 33,700; vLLM as it comes made 13,009.
_GOALS: dict[str, Row] = {"native": {"goal_tokens_per_s": 20_000.0}}


def decoding(m: Machine) -> Iterator[Row]:
    """The rate of each engine that draws for zerokl, the most important first."""
    return rates(m, _OURS)


def rates(m: Machine, engines: Mapping[str, str]) -> Iterator[Row]:
    """The rate of each engine. engines: names of engines.make, and what the table calls each."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(m, Path(folder), m.shapes[m.first_shape][2], m.vocab, torch.bfloat16)
        for engine, name in engines.items():
            what = f"decoding, {name}"
            if engine != "native" and find_spec("vllm") is None:
                yield {"what": f"{what}: not compared (vLLM is not installed)"}
            elif engine not in _ON_A_CPU and not m.on_gpu:
                yield {"what": f"{what}: not compared (it needs a GPU)"}
            else:
                job = module_command(m, "device.decode", engine, str(model), name)
                for row in rows_of(m, {what: job}, _LIMIT_S):
                    yield row | ({} if m.small else _GOALS.get(engine, {}))


def _rate(m: Machine, engine: str, model: str, name: str) -> Iterator[Row]:
    """In a process of its own: the median rate of the calls."""
    samples, length, new = (4, 8, 8) if m.small else (8, 128, 256)
    prompts = [[20 + (7 * i + 3 * j + i * j) % 90 for j in range(length)] for i in range(samples)]
    requests = Requests(prompts, samples, new, cache_bytes=(1 << 28 if m.small else 8 << 30))
    call, rates = make(engine, Path(model), torch.bfloat16, m.device, requests), []
    for i in range(_CALLS):
        began = time.perf_counter()
        tokens = call(i)
        rates.append(tokens / (time.perf_counter() - began))
    assert tokens == requests.sequences * new, "an engine stopped early"
    yield {
        "what": f"decoding {requests.sequences} x {new} tokens after {length}, {name}",
        "tokens_per_s": statistics.median(rates[1:]),
        "least": min(rates[1:]),
        "most": max(rates[1:]),
    }


SECTIONS = (decoding,)

if __name__ == "__main__":
    serve(_rate)
