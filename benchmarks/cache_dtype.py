"""What it costs to keep keys and values in bf16 beside fp32 weights: sampling with the cache in bf16, and
with the same bits in fp32.

python benchmarks/cache_dtype.py          (the model of bench_step.py; the three ways alternate, CPU seconds of one thread)
"""

import tempfile
import time
from pathlib import Path

import torch
from bench_step import make_model
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder, Numerics

# Prompts, tokens of each, samples of each, new tokens.
CASES = ((8, 16, 8, 64), (4, 300, 2, 32))
ROUNDS = 6


class Wide(Decoder):
    """Rounds keys and values as `cache` says, and stores them in fp32."""

    cache_dtype = torch.float32


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch) / "model")
        plain = load_decoder(Path(scratch) / "model", torch.float32)
    parts, narrow = (plain.config, plain.flat.detach(), plain.layout), Numerics(cache=torch.bfloat16)
    ways = {
        "stored in bf16": Decoder(*parts, narrow),
        "rounded, stored in fp32": Wide(*parts, narrow),
        "not rounded": plain,
    }
    for prompts, length, num_generations, tokens in CASES:
        ids = [[(7 * i + 3 * j) % 90 + 3 for j in range(length)] for i in range(prompts)]
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, decoder in ways.items():
                began = time.process_time()
                NativeSampler(decoder).generate(
                    ids,
                    GenerationParams(SamplingParams(), num_generations, tokens, frozenset()),
                    RngKey(0, 0),
                )
                seconds[way].append(time.process_time() - began)
        for way, decoder in ways.items():
            size = BlockCache.bytes_per_block(decoder.config, decoder.cache_dtype)
            best, worst = min(seconds[way]), max(seconds[way])
            print(
                f"{prompts} x {length} tokens, {num_generations} x {tokens} new, {way}: {size} bytes a block, {best:.3f} to {worst:.3f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
