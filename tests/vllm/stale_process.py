"""Audits an engine in place after a weight update that forgot to reset the prefix cache, or did not. Not a test.

stale_process.py MODEL SEED FORGETS
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
from engine_process import ForgetsToReset
from zerokl.engine.audit.audit import compare
from zerokl.engine.audit.page import verdict
from zerokl.engine.audit.stock import VllmZeroklEngine
from zerokl.engine.rollout import Sampling
from zerokl.engine.text import Text
from zerokl.kernels.logprob import Distribution

PROMPTS = [[5 + (7 * i + 3 * j) % 40 for j in range(70)] for i in range(4)]


def main() -> None:
    model, rng, forgets = Path(sys.argv[1]), random.Random(int(sys.argv[2])), sys.argv[3] == "1"
    engine = VllmZeroklEngine(model, torch.bfloat16)
    if forgets:
        engine.sampler.__class__ = ForgetsToReset

    def draw():
        return [(r, Distribution()) for r in engine.generate(PROMPTS, Sampling(Distribution(), 1, 16, frozenset({1})), 0)]

    draw()
    with torch.no_grad():
        engine.decoder.w[f"layers.{rng.randrange(engine.decoder.config.layers - 1)}.{rng.choice(['o', 'down', 'gate_up'])}"].mul_(1.5)
    engine.sampler.load_weights({}, 1)
    names = {"sampler": engine.name, "trainer": "zerokl"}
    report = names | compare(engine, draw(), Text(model, engine.decoder.config.vocab_size), engine, draw)
    print("FOUND", json.dumps({"frac_equal": report["frac_equal"], "verdict": verdict(report)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
