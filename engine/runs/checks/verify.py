"""`zerokl verify`: the law's checks on this machine, for one model in each dtype.

Every check computes the log-probabilities of the same tokens (or gradients, or samples) in two ways, and
compares bits. The law says that the difference between the two ways must not matter.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ....kernels.backend import find_device
from ....kernels.philox import Stream, permutation, uniform_range
from ....kernels.sampling_params import SamplingParams
from ....model.checkpoint import DTYPES, load_decoder, resolve_model
from ....model.decoder import Decoder
from ....model.scoring import cached_scores, logprobs, pack
from ....verify.invariance import Check
from ...config.loss_section import LossConfig
from ...config.precision_section import full_dtype
from ...rollout.native import NativeSampler
from ...rollout.types import GenerationParams, RngKey, Rollout, complete
from ...train.losses.advantage import of_tokens
from ...train.losses.policy_loss import sequence_weights
from ...train.parallel.workers import Workers, cpu_threads, suits
from ...train.shard import Shard, ShardWork
from ..init import random_decoder

Pair = tuple[list[int], list[int]]
Tensors = Sequence[torch.Tensor]
# What a check computes in two ways, one pair after the other.
Ways = Iterator[tuple[Tensors, Tensors]]
_PLAIN = SamplingParams()
_SAMPLING_PARAMS = (
    _PLAIN,
    SamplingParams(0.7),
    SamplingParams(1.0, 0, 0.9),
    SamplingParams(0.9, 20, 0.95),
)


def check_law(
    model: str | None = None,
    dtypes: Sequence[str] = tuple(DTYPES),
    sequences: int = 12,
    longest: int = 80,
    seed: int = 0,
    device: str = "auto",
    progress: Callable[[list[str]], None] | None = None,
) -> list[Check]:
    """The law's checks for a model, each with its numbers of `comparisons` and `unequal`.

    Without a model, a tiny random one is checked. progress: is called after each check, with words
    about it. Raises ValueError for an unknown model, dtype or device,
    and for too few sequences or tokens.
    """
    dtypes = [full_dtype(dtype) for dtype in dtypes]
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"dtype ({dtype}) must be one of {', '.join(DTYPES)}")
    if sequences < 1 or longest < 2:
        raise ValueError(
            f"verify: sequences ({sequences}) must be at least 1 and longest ({longest}) at least 2 tokens"
        )
    folder, checks = None if model is None else resolve_model(model), []
    for dtype in dtypes:
        decoder = _decoder(folder, DTYPES[dtype], seed, find_device(device))
        length = min(longest, decoder.config.max_positions)
        pairs = random_pairs(sequences, length, decoder.config.vocab_size, seed)
        for name, ways in CHECKS.items():
            check = Check.between(name, dtype, ways(decoder, pairs, seed))
            checks.append(check)
            if progress:
                progress([dtype, name, f"{check.comparisons:,} comparisons, {check.unequal:,} unequal"])
    return checks


def _decoder(model: Path | None, dtype: torch.dtype, seed: int, device: torch.device | None) -> Decoder:
    if model is not None:
        return load_decoder(model, dtype, device)
    decoder = random_decoder("tiny", 64, seed)
    return Decoder(decoder.config, decoder.flat.detach().to(device, dtype), decoder.layout)


def random_pairs(n: int, longest: int, vocab: int, seed: int) -> list[Pair]:
    """n (prompt, completion) pairs of random tokens and random lengths, 2 .. longest tokens in all."""
    u = uniform_range(2 * n, seed, Stream.VERIFY, word=1).reshape(n, 2)
    pairs = []
    for i, (a, b) in enumerate(u):
        total = 2 + int(a * (longest - 1))
        prompt = 1 + int(b * (total - 1))
        ids = (uniform_range(total, seed, Stream.VERIFY, word=2 + i) * vocab).astype(np.int64).tolist()
        pairs.append((ids[:prompt], ids[prompt:]))
    return pairs


@torch.no_grad()
def score(decoder: Decoder, pairs: Sequence[Pair], params: SamplingParams = _PLAIN) -> Tensors:
    """logp [completion tokens] of each pair, scored together; on the CPU."""
    batch = pack(pairs)
    return list(logprobs(decoder, batch, params)[0].cpu().split(batch.drawn_lengths))


def scored_alone(decoder: Decoder, pairs: Sequence[Pair], params: SamplingParams) -> Tensors:
    """logp [completion tokens] of each pair, each scored alone; on the CPU."""
    return [score(decoder, [pair], params)[0] for pair in pairs]


def _composition(decoder: Decoder, pairs: Sequence[Pair], seed: int) -> Ways:
    for params in _SAMPLING_PARAMS:
        yield score(decoder, pairs, params), scored_alone(decoder, pairs, params)


def _order(decoder: Decoder, pairs: Sequence[Pair], seed: int) -> Ways:
    together = score(decoder, pairs)
    for draw in range(3):
        order = permutation(len(pairs), seed, Stream.VERIFY, word=1000 + draw)
        yield [together[i] for i in order], score(decoder, [pairs[i] for i in order])


def _padding(decoder: Decoder, pairs: Sequence[Pair], seed: int) -> Ways:
    """Tokens that are appended to a sequence must not change the tokens before them."""
    together, limit = score(decoder, pairs), decoder.config.max_positions
    for extra in (1, 15, 33):
        padded = [(p, [*c, *[0] * min(extra, limit - len(p) - len(c))]) for p, c in pairs]
        scores = score(decoder, padded)
        yield together, [x[: len(c)] for x, (_, c) in zip(scores, pairs, strict=True)]


def _chunked(decoder: Decoder, pairs: Sequence[Pair], seed: int) -> Ways:
    for params in _SAMPLING_PARAMS:
        together = score(decoder, pairs, params)
        for chunk in (7, 32):
            yield together, cached_scores(decoder, pairs, params, chunk)


def _decode(decoder: Decoder, pairs: Sequence[Pair], seed: int) -> Ways:
    for params in _SAMPLING_PARAMS:
        yield score(decoder, pairs, params), cached_scores(decoder, pairs, params, 1)


def _threads(decoder: Decoder, pairs: Sequence[Pair], seed: int) -> Ways:
    together = score(decoder, pairs)
    for threads in (1, 2, 3, 4):
        with cpu_threads(threads):
            scores = score(decoder, pairs)
        yield together, scores


def _concurrency(decoder: Decoder, pairs: Sequence[Pair], seed: int) -> Ways:
    """Sampled tokens and their logprobs must not depend on what is sampled beside them.

    The trainer's logprobs of these tokens must be the sampler's.
    """
    room = decoder.config.max_positions - max(len(p) for p, _ in pairs)
    prompts, rng_key = [p for p, _ in pairs[:4]], RngKey(seed, 0, Stream.VERIFY_SAMPLE)
    for params in _SAMPLING_PARAMS:
        generation_params = GenerationParams(params, 3, min(24, room), frozenset({0}))
        expected = complete(NativeSampler(decoder, 64), prompts, generation_params, rng_key)
        for concurrency, tokens in ((1, 1024), (5, 9)):
            sampler = NativeSampler(decoder, concurrency, tokens)
            rollouts = complete(sampler, prompts, generation_params, rng_key)
            for a, b in zip(expected, rollouts, strict=True):
                n = max(len(a.completion_ids), len(b.completion_ids))
                ids = [torch.tensor([*r.completion_ids, *[-1] * (n - len(r.completion_ids))]) for r in (a, b)]
                yield [ids[0]], [ids[1]]
                if a.completion_ids == b.completion_ids:
                    yield [torch.from_numpy(a.logprobs)], [torch.from_numpy(b.logprobs)]
        drawn = [(list(r.prompt_ids), list(r.completion_ids)) for r in expected]
        yield [torch.from_numpy(r.logprobs) for r in expected], score(decoder, drawn, params)


_SHARDS = 4


def as_step(decoder: Decoder, pairs: Sequence[Pair]) -> Shard:
    """The pairs as a training step: rollouts with the trainer's logprobs, advantages and loss weights."""
    rollouts = [
        Rollout.of_one_turn(i, 0, prompt, completion, logp.numpy(), "length", 0)
        for i, ((prompt, completion), logp) in enumerate(zip(pairs, score(decoder, pairs), strict=True))
    ]
    lengths = [len(completion) for _, completion in pairs]
    A = of_tokens([1.0 - 0.25 * i for i in range(len(pairs))], lengths)
    return Shard(rollouts, A, np.array(sequence_weights(lengths, "tokens", 1)))


def _gradient(workers: Workers, step: Shard, micro_batch: int) -> torch.Tensor:
    """The gradient of the loss "pg" over virtual shards, as training has it. -> [layout.numel] fp32."""
    work = ShardWork(SamplingParams(), LossConfig(), micro_batch)
    gradient = workers.sum_shards(work, step.cut(_SHARDS))[1]
    assert gradient is not None, "there are pairs"
    return gradient.clone()


def _micro_batch(decoder: Decoder, pairs: Sequence[Pair], seed: int) -> Ways:
    workers, step = Workers(decoder, _SHARDS), as_step(decoder, pairs)
    whole = _gradient(workers, step, len(pairs))
    for size in (1, 2):
        yield [whole], [_gradient(workers, step, size)]


def _gradient_threads(decoder: Decoder, pairs: Sequence[Pair], seed: int) -> Ways:
    step = as_step(decoder, pairs)
    expected = _gradient(Workers(decoder, _SHARDS), step, 2)
    can_have_workers = decoder.device.type == "cpu" and suits(decoder.layout.numel)
    threads_and_workers = [(1, 1), (2, 1), (4, 1)] + [(2, 2), (4, 4)] * can_have_workers
    for threads, n in threads_and_workers:
        with cpu_threads(threads), Workers(decoder, _SHARDS, n) as workers:
            gradient = _gradient(workers, step, 2)
        yield [expected], [gradient]


CHECKS: dict[str, Callable[[Decoder, Sequence[Pair], int], Ways]] = {
    "batch composition": _composition,
    "order in the batch": _order,
    "padding": _padding,
    "chunked prefill": _chunked,
    "decode against prefill": _decode,
    "threads": _threads,
    "sampler concurrency": _concurrency,
    "gradient: micro-batch size": _micro_batch,
    "gradient: threads and workers": _gradient_threads,
}
