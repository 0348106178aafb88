"""Prints, as JSON, which binaries of a step Triton finds in its cache, after all but one were compiled ahead.

No GPU takes part: benchmarks/host_cost.py has a driver that launches nothing. The argument is the target. Run
without TRITON_INTERPRET.
"""

import json
import os
import sys
import tempfile

import torch
import triton
from zerokl.benchmarks.host_cost import pretend
from zerokl.benchmarks.machine import model_config
from zerokl.engine.config.config_file import load_config
from zerokl.engine.rollout import generation
from zerokl.engine.runs.compile_ahead import compile_launches, launches_of_a_step
from zerokl.engine.runs.memory import PassSizes, RunShape
from zerokl.kernels.tiles import tiles_of_target
from zerokl.model.decoder import Decoder
from zerokl.model.weights import Layout

from tests.triton import launches

LEFT_OUT = "_silu_mul_bwd"


def main(target: str) -> None:
    pretend(keep_calls=False)
    layout = Layout(model_config("Qwen3", 128, 256, 2, 1, 128, layers=2, vocab=1024, context=1024))
    overrides = {"dtype": "bfloat16", "prompts": "2", "num_generations": "4", "sampling.max_tokens": "200"}
    shape = RunShape(load_config(None, "demo", overrides), layout, prompt_tokens=150)
    ahead = launches_of_a_step(shape, PassSizes(4, 1, 8), target)
    compile_launches([x for x in ahead if x.kernel.__name__ != LEFT_OUT], target, threads=2)
    hits, misses = set(), set()

    def seen(*, src, metadata, cache_hit: bool, **_: object) -> None:
        (hits if cache_hit else misses).add((metadata["name"], metadata["hash"]))

    generation.Generation._refuse = lambda *_: None
    launches.SAMPLING_PARAMS = launches.SAMPLING_PARAMS[:1]
    triton.knobs.compilation.listener = seen
    with tiles_of_target(target):
        launches.run(Decoder(layout.config, torch.empty(layout.numel, dtype=torch.bfloat16), layout))
    report = {"found": len(hits), "missing": [name for name, _ in misses], "left out": LEFT_OUT}
    print(json.dumps(report))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        main(*sys.argv[1:])
