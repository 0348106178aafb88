"""Audits vLLM with zerokl inside after a weight update, with a fault or without one, beside ours or
transformers. Not a test.

stale_process.py MODEL SEED FAULT TRAINER

FAULT: forgets (to reset the prefix cache), inside (vLLM's own copy of the decoder has another epsilon) or
none. TRAINER: zerokl or hf.
"""

import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from engine_process import ForgetsToReset
from zerokl.engine.commands.audit.audit import compare
from zerokl.engine.commands.audit.page import verdict
from zerokl.engine.rollout.engine import ZeroklEngine
from zerokl.engine.rollout.hf import HfEngine
from zerokl.engine.rollout.types import GenerationParams
from zerokl.engine.rollout.vllm_stock import VllmZeroklEngine
from zerokl.engine.tasks.tokenizer import Tokenizer
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.decoder import Decoder

PROMPTS = [[5 + (7 * i + 3 * j) % 40 for j in range(70)] for i in range(4)]


def plant(model: torch.nn.Module) -> None:
    d = model.decoder
    model.decoder = Decoder(replace(d.config, eps=100 * d.config.eps), d.flat.detach(), d.layout)


def main() -> None:
    model, rng, fault = Path(sys.argv[1]), random.Random(int(sys.argv[2])), sys.argv[3]
    engine = VllmZeroklEngine(model, torch.bfloat16)
    if fault == "forgets":
        engine.sampler.__class__ = ForgetsToReset

    def draw():
        return [
            (r, SamplingParams())
            for r in engine.generate(PROMPTS, GenerationParams(SamplingParams(), 1, 16, frozenset({1})), 0)
        ]

    draw()
    with torch.no_grad():
        engine.decoder.w[
            f"layers.{rng.randrange(engine.decoder.config.layers - 1)}.{rng.choice(['o', 'down', 'gate_up'])}"
        ].mul_(1.5)
    engine.sampler.sync_weights(1)
    if fault == "inside":
        engine.sampler.llm.apply_model(plant)
    trainer = ZeroklEngine(model, torch.bfloat16)
    if sys.argv[4] == "hf":
        trainer = HfEngine(model, torch.bfloat16)
        trainer.load_weights(engine.decoder.layout.checkpoint_views(engine.decoder.flat))
    else:
        trainer.decoder.flat.detach().copy_(engine.decoder.flat)
    names = {"sampler": engine.name, "trainer": trainer.name}
    report = names | compare(
        trainer, draw(), Tokenizer(model, engine.decoder.config.vocab_size), engine, draw
    )
    print("FOUND", json.dumps({"frac_equal": report["frac_equal"], "verdict": verdict(report)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
