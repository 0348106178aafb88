"""Sampling after long prompts on a CPU, beside transformers' generate, by turns in one process.

    python benchmarks/long_sampling.py [--prompt 2048] [--turns 15] [--dtype float32]

4 prompts x 4 samples x 64 new tokens of the model of bench_step.py. The native sampler reads a prompt once
for its samples; generate reads it for each. A figure is zerokl's time over the other's of the same turn: the
median, and the range of 80% of the turns. Beside it stands the range of each side's own times, over their
median: the machine's noise.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3ForCausalLM
from zerokl.benchmarks.bench_step import make_model
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder

PROMPTS, SAMPLES, NEW_TOKENS = 4, 4, 64
Call = Callable[[int], int]  # draws the tokens of turn i, and returns their number


def ours(folder: Path, dtype: torch.dtype, prompts: Sequence[Sequence[int]]) -> Call:
    """The native sampler."""
    sampler = NativeSampler(load_decoder(folder, dtype))
    params = GenerationParams(SamplingParams(), SAMPLES, NEW_TOKENS, frozenset())
    return lambda i: sum(len(r.completion_ids) for r in complete(sampler, prompts, params, RngKey(0, i)))


def theirs(folder: Path, dtype: torch.dtype, prompts: Sequence[Sequence[int]]) -> Call:
    """transformers' generate, which draws all samples together."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype)
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        num_return_sequences=SAMPLES,
        pad_token_id=0,
        eos_token_id=1,
    )
    ids = torch.tensor(prompts)
    mask = torch.ones_like(ids)
    return lambda _: model.generate(ids, attention_mask=mask, generation_config=config)[
        :, ids.shape[1] :
    ].numel()


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The range of 80% of the values."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    prompts = [[20 + (7 * i + 3 * j + i * j) % 90 for j in range(options.prompt)] for i in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as name:
        model = Path(make_model(Path(name), positions=options.prompt + NEW_TOKENS))
        sides = {"zerokl": ours, "transformers": theirs}
        calls = {side: make(model, dtype, prompts) for side, make in sides.items()}
    seconds: dict[str, list[float]] = {side: [] for side in calls}
    for turn in range(options.turns + 1):
        for side in list(calls)[:: 1 if turn % 2 else -1]:
            began_s = time.perf_counter()
            assert calls[side](turn) == PROMPTS * SAMPLES * NEW_TOKENS
            seconds[side].append(time.perf_counter() - began_s)
    timed = {side: values[1:] for side, values in seconds.items()}  # the first turn warms up
    ratios = [a / b for a, b in zip(*timed.values(), strict=True)]
    report = {
        "what": f"{PROMPTS} x {SAMPLES} x {NEW_TOKENS} tokens after {options.prompt}, {options.dtype}",
        "zerokl over transformers": statistics.median(ratios),
        "80% of turns": spread(ratios),
    }
    for side, values in timed.items():
        median = statistics.median(values)
        report[f"{side}, s"] = median
        report[f"{side}, noise"] = [x / median for x in spread(values)]
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
