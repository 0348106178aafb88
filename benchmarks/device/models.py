"""Runs of models that are not dense, or not trained whole: a mixture of experts, and adapters.

Each is trained in three dtypes, twice with the native sampler and once with vllm-zerokl: the trainer's
logprobs beside the sampler's, and the fingerprints. Each dtype has a process of its own; they run at once.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from zerokl.benchmarks.device.installed import has_vllm, without_vllm
from zerokl.benchmarks.device.processes import module_command, rows_of, serve
from zerokl.benchmarks.device.runs import settings, take_steps, write_decoder
from zerokl.benchmarks.device.vllm_runs import DTYPES
from zerokl.benchmarks.machine import Machine, Row, model_config
from zerokl.model.config import ModelConfig

# Experts of a layer, of a token, and the width of one: Qwen3-30B-A3B's.
_EXPERTS, _TOY_EXPERTS = (128, 8, 768), (6, 2, 32)
_RANK = 16


def experts(m: Machine) -> Iterator[Row]:
    """A Qwen3-MoE of two layers, with the smallest shape's widths and the experts of Qwen3-30B-A3B."""
    return _in_processes(m, "experts")


def adapters(m: Machine) -> Iterator[Row]:
    """Adapters of a dense model of two layers."""
    return _in_processes(m, "adapters")


def _in_processes(m: Machine, kind: str) -> Iterator[Row]:
    jobs = {f"{kind} {dtype}": module_command(m, "device.models", kind, dtype) for dtype in DTYPES}
    return rows_of(m, jobs, m.left_s())


def _runs(m: Machine, kind: str, dtype: str) -> Iterator[Row]:
    """In a process of its own: the runs in one dtype."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_decoder(m.random_decoder(_config(m, kind), torch.float32), Path(folder))
        values = settings(m, model, getattr(torch, dtype), 2 if m.small else 6)
        values |= {"lora": {"rank": _RANK}} if kind == "adapters" else {}
        first = take_steps(values)
        for sampler in ("native", "vllm-zerokl"):
            what = f"{kind} {dtype}, sampler {sampler}"
            if sampler != "native" and not has_vllm():
                yield without_vllm(what)
                continue
            run = take_steps(values | {"sampler": sampler})
            yield from run.beside(first, what)


def _config(m: Machine, kind: str) -> ModelConfig:
    """The configuration of the model."""
    D, inner, _, *heads = m.shapes[m.first_shape]
    number, per_token, size = _TOY_EXPERTS if m.small else _EXPERTS
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": number,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": size,
        "norm_topk_prob": True,
    }
    fields = mixture if kind == "experts" else {}
    return model_config("Qwen3", D, inner, *heads, layers=2, vocab=128 if m.small else 4096, **fields)


SECTIONS = (experts, adapters)

if __name__ == "__main__":
    serve(_runs)
