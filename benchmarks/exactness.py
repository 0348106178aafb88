"""The comparisons on a GPU for device.sh: the law on a model, and a run of exact policy gradient."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from zerokl.benchmarks.machine import Machine, Row, name_of
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache, CachedContext
from zerokl.model.context import Buffers, PackedContext
from zerokl.model.decoder import Decoder
from zerokl.model.prompts import Prompts, prompt_passes
from zerokl.model.scoring import logprobs, pack
from zerokl.model.weights import fingerprint

Pair = tuple[Sequence[int], Sequence[int]]


def exactness(m: Machine) -> Iterator[Row]:
    """The law on a model of two layers, in each dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        decoder = m.decoder(m.first_shape, 2, min(m.vocab, 4096), dtype)
        yield from law(decoder, f"law {name_of(dtype)}", SMALL_LENGTHS if m.small else LENGTHS)


# Tokens of the sequences: at the edges of tiles, and beside them.
SMALL_LENGTHS, LENGTHS = (9, 40, 5), (9, 300, 33, 130, 5, 64, 257)


def law(decoder: Decoder, what: str, lengths: Sequence[int]) -> Iterator[Row]:
    """A row for each way to compute what a packed batch computes, and its unequal bits.

    A sequence is computed alone, in a batch, in chunks, token by token, and after prompts that are read once.
    The gradient is computed by micro-batches of two sizes.
    """
    from zerokl.engine.train.parallel.gradient import ShardSum

    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(100, (n,), generator=generator).tolist() for n in lengths]
    unequal = _forward_ways(decoder, ids)
    pairs = [(x[:4], completion) for x in ids for completion in (x[4:], x[:3])]
    with torch.no_grad():
        whole = logprobs(decoder, pack(pairs), SamplingParams())[0].cpu()
    gradients = []
    for size in (len(pairs), 1):
        shard = ShardSum(decoder, 1)
        work = partial(_differentiate, coefficients=torch.ones(len(pairs)), size=size)
        (logp,) = shard.add(work, [pairs])
        unequal[f"prompts once, {size} sequences at a time"] = count_unequal(logp, whole)
        gradients.append(shard.tree.take().clone())
    unequal["gradient by micro-batches"] = count_unequal(*gradients)
    for way, n in unequal.items():
        yield {"what": f"{what}: {way}", "unequal": n}


def _differentiate(
    decoder: Decoder,
    shards: Sequence[Sequence[Pair]],
    buffers: Buffers,
    coefficients: torch.Tensor,
    size: int,
) -> list[torch.Tensor]:
    """logp [C] of the pairs' completions, on the CPU. The gradient of their weighted sum goes to the weights.

    coefficients [pairs]: the weight of each pair. The pairs are computed as a virtual shard is in training
    (engine/train/shard.py): each prompt is read once, and `size` pairs go through the model at a time.
    """
    (pairs,), logprobs_of_parts = shards, []
    for pass_slice in prompt_passes([prompt for prompt, _ in pairs]):
        pass_pairs, pass_coefficients = pairs[pass_slice], coefficients[pass_slice]
        prompts = Prompts(decoder, [prompt for prompt, _ in pass_pairs], buffers=buffers)
        for start in range(0, len(pass_pairs), size):
            part = slice(start, start + size)
            packed = pack(pass_pairs[part], prompts.prompt_of_sample[part])
            logp = logprobs(decoder, packed, SamplingParams(), prompts=prompts)[0].cpu()
            lengths = torch.tensor(packed.drawn_lengths)
            (logp * pass_coefficients[part].repeat_interleave(lengths)).sum().backward()
            logprobs_of_parts.append(logp.detach())
        prompts.backward()
    return [torch.cat(logprobs_of_parts)]


@torch.no_grad()
def _forward_ways(decoder: Decoder, sequences: list[list[int]]) -> dict[str, int]:
    """For each other way to compute the hidden states: elements whose bits differ from the packed batch's."""
    lengths = [len(x) for x in sequences]
    packed = torch.tensor([token for x in sequences for token in x])
    together = decoder.hidden(packed, PackedContext(lengths, decoder.config)).split(lengths)
    unequal = {"alone": 0, "chunks of 32": 0, "token by token": 0}
    for x, expected in zip(sequences, together, strict=True):
        alone = decoder.hidden(torch.tensor(x), PackedContext([len(x)], decoder.config))
        unequal["alone"] += count_unequal(alone, expected)
        unequal["chunks of 32"] += count_unequal(_cached(decoder, x, 32), expected)
        if len(x) <= 70:
            unequal["token by token"] += count_unequal(_cached(decoder, x, 1), expected)
    return unequal


def _cached(decoder: Decoder, ids: list[int], chunk: int) -> torch.Tensor:
    """The hidden states of a sequence that is read through the cache, `chunk` tokens at a time."""
    cache = BlockCache(decoder.config, len(ids) // KEY_TILE + 1, decoder.cache_dtype, decoder.device)
    blocks = cache.allocate(cache.blocks)
    parts = [(a, ids[a : a + chunk]) for a in range(0, len(ids), chunk)]
    return torch.cat(
        [decoder.hidden(torch.tensor(p), CachedContext(cache, [len(p)], [a], [blocks])) for a, p in parts]
    )


def reinforcement(m: Machine) -> Iterator[Row]:
    """20 steps (small: 2) of policy gradient with the native sampler, run twice.

    Every logprob is compared, and every step must change the weights.
    """
    steps = 2 if m.small else 20
    for dtype in (torch.bfloat16, torch.float16):
        what = f"policy gradient {name_of(dtype)}"
        runs = [_train(m, dtype, steps) for _ in range(2)]
        weights = [fingerprints[-1] for fingerprints, _, _ in runs]
        yield {
            "what": f"{what}: {runs[0][1]} tokens, trainer against sampler",
            "unequal": sum(unequal for _, _, unequal in runs),
        }
        yield {
            "what": f"{what}: two runs, fingerprints that differ",
            "unequal": int(weights[0] != weights[1]),
        }
        yield {
            "what": f"{what}: steps that left the weights as they were",
            "unequal": steps + 1 - len(set(runs[0][0])),
        }


def _train(m: Machine, dtype: torch.dtype, steps: int) -> tuple[list[str], int, int]:
    """Train with a reward for large token ids.

    Returns the fingerprints of the weights before the first and after each step, the number of tokens
    compared, and the number of tokens whose two logprobs differ.
    """
    from zerokl.engine.config.run_config import OptimizerConfig
    from zerokl.engine.rollout.native import NativeSampler
    from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
    from zerokl.engine.train.master_weights import SlicedWeights
    from zerokl.engine.train.optimizer import Optimizer
    from zerokl.engine.train.parallel.gradient import ShardSum

    source = m.decoder(m.first_shape, 2, 128, torch.float32)
    master = source.flat.detach()
    decoder = Decoder(source.config, master.to(dtype), source.layout)
    optimizer, shards = (
        Optimizer(SlicedWeights(decoder, master), OptimizerConfig(), steps),
        ShardSum(decoder, 1),
    )
    sampler = NativeSampler(decoder, max_concurrency=16)
    generation_params = GenerationParams(SamplingParams(), 4, 8 if m.small else 48, frozenset({0}))
    fingerprints = [fingerprint(decoder.layout, optimizer.weights.master)]
    tokens = unequal = 0
    for step in range(steps):
        prompts = [[3 + p, 7, 11 + step % 5] for p in range(4)]
        rollouts = complete(sampler, prompts, generation_params, RngKey(0, step))
        # Samples of a group have different rewards, so every step has a gradient.
        rewards = [sum(r.completion_ids) / len(r.completion_ids) / 128 for r in rollouts]
        rewards_PG = torch.tensor(rewards).view(4, 4)
        A = (rewards_PG - rewards_PG.mean(1, keepdim=True)).flatten()
        sampled = torch.cat([torch.from_numpy(r.logprobs) for r in rollouts])
        differentiate = partial(_differentiate, coefficients=-A / len(sampled), size=6)
        (logp,) = shards.add(differentiate, [[r.pair for r in rollouts]])
        tokens, unequal = tokens + len(logp), unequal + count_unequal(logp, sampled)
        optimizer.update(shards.tree.take())
        fingerprints.append(fingerprint(decoder.layout, optimizer.weights.master))
    return fingerprints, tokens, unequal
