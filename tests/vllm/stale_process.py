"""Audits vLLM with zerokl inside, after a weight update, with a fault or without one.

    stale_process.py MODEL SEED FAULT TRAINER

Not a test: a script of test_audit.py. FAULT is forgets (the prefix cache is not reset), inside (vLLM's own
copy of the decoder has another epsilon) or none. TRAINER is zerokl or hf (transformers).
"""

import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from engine_process import ForgetsToReset
from zerokl.audit.compare import compare_engines
from zerokl.audit.conclusion.conclude import concluded
from zerokl.audit.conclusion.outcome import NO_TOLERANCES
from zerokl.audit.conclusion.verdict import verdict
from zerokl.audit.config import AuditSettings
from zerokl.audit.engines.engine import ZeroklEngine
from zerokl.audit.engines.hf import HfEngine
from zerokl.audit.engines.vllm import VllmZeroklEngine
from zerokl.audit.report import Measurements
from zerokl.audit.settings import Source, assumed
from zerokl.engine.rollout.types import GenerationParams, Rollout
from zerokl.engine.tasks.tokenizer import Tokenizer
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.decoder import Decoder

PROMPTS = [[5 + (7 * i + 3 * j) % 40 for j in range(70)] for i in range(4)]


def plant(model: torch.nn.Module) -> None:
    """Give vLLM's copy of the decoder another epsilon."""
    d = model.decoder
    model.decoder = Decoder(replace(d.config, eps=100 * d.config.eps), d.flat.detach(), d.layout)


def main() -> None:
    model, rng, fault = Path(sys.argv[1]), random.Random(int(sys.argv[2])), sys.argv[3]
    engine = VllmZeroklEngine(model, torch.bfloat16)
    if fault == "forgets":
        engine.sampler.__class__ = ForgetsToReset

    def draw() -> list[tuple[Rollout, SamplingParams]]:
        generation_params = GenerationParams(SamplingParams(), 1, 16, frozenset({1}))
        return [(r, SamplingParams()) for r in engine.generate(PROMPTS, generation_params, 0)]

    draw()
    layer = rng.randrange(engine.decoder.config.layers - 1)
    with torch.no_grad():
        engine.decoder.w[f"layers.{layer}.{rng.choice(['o', 'down', 'gate_up'])}"].mul_(1.5)
    engine.sampler.sync_weights(1)
    if fault == "inside":
        engine.sampler.llm.apply_model(plant)
    trainer = ZeroklEngine(model, torch.bfloat16)
    if sys.argv[4] == "hf":
        trainer = HfEngine(model, torch.bfloat16)
        trainer.load_weights(engine.decoder.layout.checkpoint_views(engine.decoder.flat))
    else:
        trainer.decoder.flat.detach().copy_(engine.decoder.flat)
    tokenizer = Tokenizer(model, engine.decoder.config.vocab_size)
    comparison = compare_engines(engine, trainer, draw(), tokenizer, draw)
    dtypes = AuditSettings().dtypes
    measured = Measurements(
        model=str(model),
        sampler=engine.name,
        trainer=trainer.name,
        dtypes=dtypes,
        log_notes=[],
        assumed=assumed(dtypes, [SamplingParams()], "cpu", Source()),
        **vars(comparison),
    )
    words = verdict(concluded(measured, NO_TOLERANCES))
    print("REPORT", json.dumps({"frac_equal": comparison.figures.frac_equal, "verdict": words}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
