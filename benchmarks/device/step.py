"""The whole exact step and its split, beside a step of TRL's GRPO with vLLM beside it.

8 prompts of 128 tokens x 8 samples x 256 new tokens, the widths of Qwen3-0.6B, random weights, bf16. Each
engine has a process of its own; the first step compiles and is dropped. TRL is the one of this Python, or of
the Python that the variable TRL_PYTHON names; without vLLM it samples by transformers' generate.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from zerokl.benchmarks.device.price import price
from zerokl.benchmarks.device.processes import module_command, rows_of, serve
from zerokl.benchmarks.device.runs import TASK, each_step, settings, write_model
from zerokl.benchmarks.machine import Machine, Row
from zerokl.model.cache import BlockCache
from zerokl.model.config import ModelConfig

_STEPS = 4
_LIMIT_S = 100
# Prompts, samples of each, tokens of a prompt, and new tokens.
_SIZES, _SMALL_SIZES = (8, 8, 128, 256), (2, 4, 8, 8)


def _sizes(m: Machine) -> tuple[int, int, int, int]:
    return _SMALL_SIZES if m.small else _SIZES


def whole_step(m: Machine) -> Iterator[Row]:
    """The exact step with each sampler, and then TRL's. The last row compares the two."""
    with tempfile.TemporaryDirectory() as name:
        model = write_model(m, Path(name), m.shapes[m.first_shape][2], m.vocab, torch.bfloat16)
        seconds: dict[str, float] = {}
        for engine, job in _jobs(m, model).items():
            if not job:
                yield {"what": f"whole step, {engine}: not compared (it is not installed)"}
                continue
            turns = _STEPS if engine.startswith("TRL") else 0
            rows = list(rows_of(m, {engine: job}, _LIMIT_S, turns))
            steps = [row for row in rows if "step_s" in row][1:]
            yield from (row for row in rows if "step_s" not in row)
            if steps:
                row = _median_row(m, engine, steps)
                seconds[engine] = row["step_s"]
                yield row
    ours, trl = (
        next((s for engine, s in seconds.items() if engine.startswith(start)), None)
        for start in ("zerokl", "TRL")
    )
    if ours and trl:
        yield {"what": "whole step: zerokl's native sampler over TRL", "ratio": ours / trl, "goal_ratio": 1.0}


def _jobs(m: Machine, model: Path) -> dict[str, list[str]]:
    """Engine -> the command of its process; empty where it is not installed."""
    samplers = ["native", *(["vllm-zerokl"] if find_spec("vllm") else [])]
    jobs = {f"zerokl, {s} sampler": module_command(m, "device.step", s, str(model)) for s in samplers}
    python = os.environ.get("TRL_PYTHON", sys.executable)
    has_vllm = m.on_gpu and _imports(python, "vllm")
    beside = "vLLM" if has_vllm else "transformers' generate"
    command = _trl_command(m, python, model, has_vllm) if _imports(python, "trl") else []
    return jobs | {f"TRL with {beside}": command}


def _imports(python: str, package: str) -> bool:
    """Whether this Python finds the package."""
    code = f"import sys, importlib.util as u; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def _trl_command(m: Machine, python: str, model: Path, vllm: bool) -> list[str]:
    prompts, samples, length, new = _sizes(m)
    options = {
        "model": model,
        "dtype": "bfloat16",
        "bf16-mode": "autocast",
        "attention": "sdpa",
        "device": m.device.type,
        "turns": _STEPS,
        "prompts": prompts,
        "prompt-chars": length,
        "num-generations": samples,
        "max-new-tokens": new,
        "micro-batch": min(16, prompts * samples),
        "threads": torch.get_num_threads(),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [python, str(Path(__file__).parents[1] / "trl_step.py"), *words, *(["--vllm"] if vllm else [])]


def _median_row(m: Machine, engine: str, steps: list[Row]) -> Row:
    """The median of each figure of the steps, and all their unequal tokens."""
    prompts, samples, length, new = _sizes(m)
    figures = {k: v for k, v in steps[0].items() if isinstance(v, float)}
    what = f"whole step of {prompts} x {samples} x {new} tokens after {length}, {engine}"
    row: Row = {"what": what} | {k: statistics.median(s[k] for s in steps) for k in figures}
    return row | ({"unequal": sum(s["unequal"] for s in steps)} if "unequal" in steps[0] else {})


def _steps(m: Machine, sampler: str, model: str) -> Iterator[Row]:
    """In a process of its own: the times of each step of zerokl."""
    prompts, samples, length, new = _sizes(m)
    values = settings(m, Path(model), torch.bfloat16, _STEPS) | {
        "sampler": sampler,
        "prompts": prompts,
        "num_generations": samples,
        "task": {"name": TASK, "options": {"prompts": prompts, "length": length}},
        "sampling": {"max_tokens": new},
        "native": {"max_concurrency": prompts * samples},
        "vllm": {
            "context": 512,
            "max_concurrency": prompts * samples,
            "cache_bytes": _cache_bytes(Path(model), prompts * samples, length + new),
        },
    }
    began_s = time.perf_counter()
    for metrics in each_step(values, cut=False):  # a row for each: what is done counts if the time runs out
        step_s = time.perf_counter() - began_s
        unequal = round(metrics["tokens"] * (1 - metrics["mismatch/frac_equal"]))
        parts = {
            name.rpartition("/")[2]: value
            for name, value in metrics.items()
            if name.startswith(("time/", "perf/"))
        }
        yield {"what": sampler, "step_s": step_s, **parts, "unequal": unequal}
        began_s = time.perf_counter()


def _cache_bytes(model: Path, sequences: int, tokens: int) -> int:
    """Bytes of a key-value cache that holds so many sequences of so many tokens at once, in bf16."""
    blocks = sequences * BlockCache.blocks_for(tokens) + 1
    return blocks * BlockCache.bytes_per_block(ModelConfig.from_file(model), torch.bfloat16)


SECTIONS = (price, whole_step)

if __name__ == "__main__":
    serve(_steps)
