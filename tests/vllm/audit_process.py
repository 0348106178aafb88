"""Plants differences in stock vLLM's in-process model, one after another, and prints where its trace first
differs. Not a test.

audit_process.py MODEL SEED TRACE      TRACE: written, or if it exists, compared with the trace of MODEL
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from zerokl.engine.rollout.vllm_stock import VllmEngine
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.verify.trace import compare_traces, first_divergence

PAIR = ((5, 6, 7, 8, 9), (10, 11, 12, 13, 14, 15))


class HalfSiLU(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.bfloat16()).to(x.dtype) * up


def plant(model: torch.nn.Module, kind: str, rng: random.Random):
    """Returns the operation that must be named, and how to undo it."""
    i = rng.randrange(len(model.model.layers))
    layer = model.model.layers[i]
    if kind == "epsilon":
        layer.post_attention_layernorm.variance_epsilon *= 1000
        return f"layers.{i}.post_norm", lambda: setattr(
            layer.post_attention_layernorm, "variance_epsilon", 1e-6
        )
    if kind == "silu":
        before = layer.mlp.act_fn
        layer.mlp.act_fn = HalfSiLU()
        return f"layers.{i}.silu_mul", lambda: setattr(layer.mlp, "act_fn", before)
    weight = (
        layer.self_attn.q_norm.weight
    )  # vLLM repacks those of projections: the test flips theirs in the checkpoint
    at, bit = rng.randrange(weight.shape[0]), 1 << rng.randrange(14, 23)

    def flip() -> None:
        with torch.no_grad():
            weight.data.view(torch.int32)[at] ^= bit

    flip()
    return f"layers.{i}.q_norm", flip


def main() -> None:
    engine, rng, found, saved = (
        VllmEngine(Path(sys.argv[1]), torch.float32, 512),
        random.Random(int(sys.argv[2])),
        [],
        Path(sys.argv[3]),
    )
    clean = engine.trace(PAIR, SamplingParams())
    if saved.exists():
        other = load_file(saved)
        first = first_divergence(compare_traces(clean, other))
        print("FOUND", json.dumps({"first": first.op if first else None}), flush=True)
        os._exit(0)
    save_file(clean, saved)
    again = first_divergence(compare_traces(clean, engine.trace(PAIR, SamplingParams())))
    for kind in ("epsilon", "silu", "bit"):
        expected, undo = engine.llm.apply_model(lambda model, kind=kind: plant(model, kind, rng))[0]
        first = first_divergence(compare_traces(clean, engine.trace(PAIR, SamplingParams())))
        undo()
        found.append([kind, expected, first.op if first else None])
    print(
        "FOUND",
        json.dumps({"operations": list(clean), "again": again.op if again else None, "planted": found}),
        flush=True,
    )
    os._exit(0)


if __name__ == "__main__":
    main()
