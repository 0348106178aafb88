"""CPU seconds of a hybrid's forward and backward where prompts are read with each sample, or once.

    python benchmarks/state_prompts.py [PROMPT COMPLETION SAMPLES]

A small Qwen3.5 with random weights, one prompt, one thread. Lengths in tokens.
"""

import sys
import time

import numpy as np
import torch
from zerokl.engine.rollout.types import Rollout
from zerokl.engine.runs.init import random_decoder
from zerokl.engine.train.losses.policy_loss import LossConfig
from zerokl.engine.train.shard import Shard, ShardWork, shard_gradients
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.decoder import Decoder
from zerokl.model.numerics import Numerics

_TURNS = 5


def main(prompt: int = 256, completion: int = 32, samples: int = 8) -> None:
    """Print the seconds of both, by turns."""
    torch.set_num_threads(1)
    random, ids = random_decoder("qwen3_5_text", 128, 0), np.random.default_rng(0)
    first = ids.integers(0, 128, prompt).tolist()
    completions = [ids.integers(0, 128, completion).tolist() for _ in range(samples)]
    logprobs = np.full(completion, -5.0, np.float32)
    rollouts = [Rollout.of_one_turn(0, i, first, x, logprobs, "length", 0) for i, x in enumerate(completions)]
    advantages = [np.full(completion, (-1.0) ** i) for i in range(samples)]
    shard = Shard(rollouts, advantages, np.full(samples, 1.0 / (samples * completion)))
    work = ShardWork(SamplingParams(), LossConfig(correction="none"), samples)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for once in [True, *[False, True] * _TURNS]:  # the first turn is not counted
        decoder = Decoder(random.config, random.flat.detach(), random.layout, Numerics(prompts_once=once))
        weights = [*decoder.w.values(), decoder.lm_head]
        buffers = {weight: GradBuffer.like(weight) for weight in weights}
        began_s = time.process_time()
        shard_gradients(decoder, [shard], buffers, work)
        seconds[once].append(time.process_time() - began_s)
    for once, turns in seconds.items():
        low, *_, high = turns = sorted(turns[-_TURNS:])
        name, median = "once" if once else "each", turns[_TURNS // 2]
        print(f"{name}: {median:.2f} CPU s ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
