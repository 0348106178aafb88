"""What a bf16 cache of keys and values costs beside fp32 weights: sampling with it, and with an fp32 cache.

    python benchmarks/cache_dtype.py

The fp32 cache is measured with the same bits as the bf16 cache, and without rounding. The model is that of
bench_step.py. The three ways alternate. Times are CPU seconds of one thread.
"""

import tempfile
import time
from pathlib import Path

import torch
from bench_step import make_model
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache
from zerokl.model.checkpoint import load_decoder
from zerokl.model.decoder import Decoder, Numerics

# Prompts, tokens of each prompt, samples of each prompt, new tokens of each sample.
CASES = ((8, 16, 8, 64), (4, 300, 2, 32))
ROUNDS = 6


class Wide(Decoder):
    """A decoder that rounds keys and values to its cache's dtype, and stores them in fp32."""

    cache_dtype = torch.float32


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        plain = load_decoder(Path(make_model(Path(scratch))), torch.float32)
    parts, narrow = (plain.config, plain.flat.detach(), plain.layout), Numerics(cache=torch.bfloat16)
    ways = {
        "stored in bf16": Decoder(*parts, narrow),
        "rounded, stored in fp32": Wide(*parts, narrow),
        "not rounded": plain,
    }
    for prompts, length, num_generations, tokens in CASES:
        ids = [[(7 * i + 3 * j) % 90 + 3 for j in range(length)] for i in range(prompts)]
        generation_params = GenerationParams(SamplingParams(), num_generations, tokens, frozenset())
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, decoder in ways.items():
                began = time.process_time()
                complete(NativeSampler(decoder), ids, generation_params, RngKey(0, 0))
                seconds[way].append(time.process_time() - began)
        for way, decoder in ways.items():
            size = BlockCache.bytes_per_block(decoder.config, decoder.cache_dtype)
            best, worst = min(seconds[way]), max(seconds[way])
            print(
                f"{prompts} x {length} tokens, {num_generations} x {tokens} new, {way}: "
                f"{size} bytes a block, {best:.3f} to {worst:.3f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
