"""Plants differences in vLLM's model, one after another, and prints where its trace first differs.

    audit_process.py MODEL SEED TRACE

Not a test: a script of test_audit.py. The model is in this process. If the file TRACE exists, nothing is
planted, and TRACE is compared with the trace of MODEL. Else TRACE is written.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from zerokl.audit.engines.vllm import VllmEngine
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.verify.operation_outputs import first_divergence

PAIR = ((5, 6, 7, 8, 9), (10, 11, 12, 13, 14, 15))


class HalfSiLU(torch.nn.Module):
    """silu_mul whose silu is computed in bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.bfloat16()).to(x.dtype) * up


def plant(model: torch.nn.Module, kind: str, rng: random.Random):
    """Plant a difference; return the operation that must be named, and a function that undoes it."""
    i = rng.randrange(len(model.model.layers))
    layer = model.model.layers[i]
    if kind == "epsilon":
        norm = layer.post_attention_layernorm
        norm.variance_epsilon *= 1000
        return f"layers.{i}.post_norm", lambda: setattr(norm, "variance_epsilon", 1e-6)
    if kind == "silu":
        before = layer.mlp.act_fn
        layer.mlp.act_fn = HalfSiLU()
        return f"layers.{i}.silu_mul", lambda: setattr(layer.mlp, "act_fn", before)
    # vLLM repacks the weights of projections. The test flips a bit of one in the checkpoint.
    weight = layer.self_attn.q_norm.weight
    index, bit = rng.randrange(weight.shape[0]), 1 << rng.randrange(14, 23)

    def flip() -> None:
        with torch.no_grad():
            weight.data.view(torch.int32)[index] ^= bit

    flip()
    return f"layers.{i}.q_norm", flip


def first_op(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> str | None:
    """The first operation in which two traces differ."""
    first = first_divergence(a, b)
    return first.op if first else None


def report(**values: object) -> None:
    print("REPORT", json.dumps(values), flush=True)
    os._exit(0)


def main() -> None:
    engine = VllmEngine(Path(sys.argv[1]), torch.float32, 512)
    rng, saved, planted = random.Random(int(sys.argv[2])), Path(sys.argv[3]), []
    clean = engine.trace(PAIR, SamplingParams())
    if saved.exists():
        report(first=first_op(clean, load_file(saved)))
    save_file(clean, saved)
    again = first_op(clean, engine.trace(PAIR, SamplingParams()))
    for kind in ("epsilon", "silu", "bit"):
        expected, undo = engine.llm.apply_model(lambda model, kind=kind: plant(model, kind, rng))[0]
        first = first_op(clean, engine.trace(PAIR, SamplingParams()))
        undo()
        planted.append([kind, expected, first])
    report(operations=list(clean), again=again, planted=planted)


if __name__ == "__main__":
    main()
