"""`zerokl verify`: the law's checks on this machine, for one model in each dtype.

Every check computes the same tokens' log-probabilities (or gradients, or samples) in two ways that the law says must not
matter, and compares bits. Shapes: S sequences; C completion tokens.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..kernels import tiles
from ..kernels.attention_plan import KEY_TILE
from ..kernels.logprob import Distribution, linear_logprob
from ..kernels.philox import Stream, permutation, uniform_range
from ..model.cache import BlockCache, CachedContext
from ..model.checkpoint import DTYPES, load_decoder
from ..model.decoder import Decoder
from ..model.prompts import Prompts, prompt_passes
from ..model.scoring import logprobs, pack
from ..verify.invariance import Check
from .initialise import random_decoder
from .native import NativeSampler
from .precision import PrecisionConfig
from .rollout import Keys, Sampling
from .shard import micro_batches, virtual_shards
from .workers import Workers, cpu_threads, suits

Pair = tuple[list[int], list[int]]
_DISTRIBUTIONS = (Distribution(), Distribution(0.7), Distribution(1.0, 0, 0.9), Distribution(0.9, 20, 0.95))


def run_checks(
    model: Path | None, dtypes: Sequence[str], sequences: int = 12, longest: int = 80, seed: int = 0, device: torch.device | None = None
) -> Iterator[Check]:
    """Run every check in every dtype. `model` None makes a tiny random one. Yields each finished line. Raises ValueError."""
    if sequences < 1 or longest < 2:
        raise ValueError(f"verify: sequences ({sequences}) must be at least 1 and longest ({longest}) at least 2 tokens")
    for name in dtypes:
        decoder = _decoder(model, DTYPES[name], seed, device)
        length = min(longest, decoder.config.max_positions)
        pairs = random_pairs(sequences, length, decoder.config.vocab_size, seed)
        for check in (_composition, _order, _padding, _chunked, _decode, _threads, _concurrency, _micro_batch, _gradient_threads):
            yield check(decoder, pairs, name, seed)


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
def _score(decoder: Decoder, pairs: Sequence[Pair], dist: Distribution) -> list[torch.Tensor]:
    """logp of each pair's completion, scored together; on the CPU."""
    batch = pack(pairs)
    return list(logprobs(decoder, batch, dist)[0].cpu().split(batch.completion_lengths))


def _compare_all(check: Check, left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        check.compare(a, b)


def _composition(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check = Check("batch composition", dtype)
    for dist in _DISTRIBUTIONS:
        _compare_all(check, _score(decoder, pairs, dist), [_score(decoder, [pair], dist)[0] for pair in pairs])
    return check


def _order(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check = Check("order in the batch", dtype)
    together = _score(decoder, pairs, Distribution())
    for draw in range(3):
        order = permutation(len(pairs), seed, Stream.VERIFY, word=1000 + draw)
        shuffled = _score(decoder, [pairs[i] for i in order], Distribution())
        _compare_all(check, [together[i] for i in order], shuffled)
    return check


def _padding(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    """Tokens appended to a sequence must not reach back."""
    check = Check("padding", dtype)
    together = _score(decoder, pairs, Distribution())
    limit = decoder.config.max_positions
    for extra in (1, 15, 33):
        padded = [(p, [*c, *[0] * min(extra, limit - len(p) - len(c))]) for p, c in pairs]
        _compare_all(check, together, [a[: len(c)] for a, (_, c) in zip(_score(decoder, padded, Distribution()), pairs, strict=True)])
    return check


def _chunked(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check = Check("chunked prefill", dtype)
    for dist in _DISTRIBUTIONS:
        together = _score(decoder, pairs, dist)
        for chunk in (7, 32):
            _compare_all(check, together, cached_scores(decoder, pairs, dist, chunk))
    return check


def _decode(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check = Check("decode against prefill", dtype)
    for dist in _DISTRIBUTIONS:
        _compare_all(check, _score(decoder, pairs, dist), cached_scores(decoder, pairs, dist, 1))
    return check


def _threads(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check = Check("threads", dtype)
    together = _score(decoder, pairs, Distribution())
    for threads in (1, 2, 3, 4):
        with cpu_threads(threads):
            _compare_all(check, together, _score(decoder, pairs, Distribution()))
    return check


def _concurrency(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    """Sampled tokens and their logprobs, whatever is sampled beside them; and the trainer's logprobs of them."""
    check = Check("sampler concurrency", dtype)
    room = decoder.config.max_positions
    for dist in _DISTRIBUTIONS:
        sampling = Sampling(dist, 3, min(24, room - max(len(p) for p, _ in pairs)), frozenset({0}))
        prompts, keys = [p for p, _ in pairs[:4]], Keys(seed, 0, Stream.VERIFY_SAMPLE)
        base = NativeSampler(decoder, 64).generate(prompts, sampling, keys)
        for concurrency, tokens in ((1, 1024), (5, 9)):
            other = NativeSampler(decoder, concurrency, tokens).generate(prompts, sampling, keys)
            for a, b in zip(base, other, strict=True):
                n = max(len(a.completion_ids), len(b.completion_ids))
                ids = [torch.tensor([*r.completion_ids, *[-1] * (n - len(r.completion_ids))]) for r in (a, b)]
                check.compare(*ids)
                if a.completion_ids == b.completion_ids:
                    check.compare(torch.from_numpy(a.logprobs), torch.from_numpy(b.logprobs))
        scored = _score(decoder, [(list(r.prompt_ids), list(r.completion_ids)) for r in base], dist)
        _compare_all(check, [torch.from_numpy(r.logprobs) for r in base], scored)
    return check


_SHARDS = 4


def _shard_gradient(decoder: Decoder, pairs: Sequence[Pair], micro_batch: int) -> None:
    """As engine/shard.py does it: prompts once, their samples in micro-batches, prompts backward."""
    for at in prompt_passes([prompt for prompt, _ in pairs]):
        some = pairs[at]
        prompts = Prompts(decoder, [prompt for prompt, _ in some])
        for part in micro_batches(len(some), micro_batch):
            logprobs(decoder, pack(some[part], prompts.of[part]), Distribution(), prompts=prompts)[0].sum().backward()
        prompts.backward()


def _gradient(workers: Workers, pairs: Sequence[Pair], micro_batch: int) -> torch.Tensor:
    """The sum of the pairs' logprobs, differentiated by all weights: virtual shards, [layout.numel] fp32."""
    shards = [shard or None for shard in virtual_shards(pairs, _SHARDS)]
    gradient = workers.sum_shards(partial(_shard_gradient, micro_batch=micro_batch), shards)[1]
    assert gradient is not None, "there are pairs"
    return gradient.clone()


def _micro_batch(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check, workers = Check("gradient: micro-batch size", dtype), Workers(decoder, _SHARDS)
    base = _gradient(workers, pairs, len(pairs))
    for size in (1, 2):
        check.compare(base, _gradient(workers, pairs, size))
    return check


def _gradient_threads(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check = Check("gradient: threads and workers", dtype)
    base = _gradient(Workers(decoder, _SHARDS), pairs, 2)
    several = decoder.device.type == "cpu" and suits(decoder.layout.numel)
    ways = [(1, 1), (2, 1), (4, 1)] + [(2, 2), (4, 4)] * several
    for threads, n in ways:
        with cpu_threads(threads), Workers(decoder, _SHARDS, n) as workers:
            check.compare(base, _gradient(workers, pairs, 2))
    return check


@torch.no_grad()
def cached_scores(decoder: Decoder, pairs: Sequence[Pair], dist: Distribution, chunk: int) -> list[torch.Tensor]:
    """logp of each pair's completion, the tokens read through the cache `chunk` at a time (1: decoding); on the CPU."""
    inputs = [[*p, *c[:-1]] for p, c in pairs]
    need = [-(-len(ids) // KEY_TILE) for ids in inputs]
    cache = BlockCache(decoder.config, sum(need), decoder.cache_dtype, decoder.device)
    blocks = [cache.allocate(n) for n in need]
    hidden: list[list[torch.Tensor]] = [[] for _ in pairs]
    for start in range(0, max(map(len, inputs)), chunk):
        active = [i for i, ids in enumerate(inputs) if len(ids) > start]
        pieces = [inputs[i][start : start + chunk] for i in active]
        context = CachedContext(cache, [len(x) for x in pieces], [start] * len(active), [blocks[i] for i in active])
        rows = decoder.hidden(torch.tensor([token for piece in pieces for token in piece]), context)
        for i, own in zip(active, rows.split([len(x) for x in pieces]), strict=True):
            hidden[i].append(own)
    scores, head = [], decoder.logits_weight()
    for (_, completion), rows in zip(pairs, hidden, strict=True):
        h = torch.cat(rows)[-len(completion) :]
        scores.append(linear_logprob(h.to(head.dtype), head, torch.tensor(completion, device=h.device), dist)[0].cpu())
    return scores


def check_case(case: Path, device: torch.device | None = None) -> list[Check]:
    """Score the rollouts of a saved mismatch again, alone and together, against what sampler and trainer had reported.

    Raises ValueError when the folder holds no such case.
    """
    try:
        report = json.loads((case / "mismatch.json").read_text(encoding="utf-8"))
        name, sampling = report["config"]["dtype"], report["config"]["sampling"]
        dist = Distribution(sampling["temperature"], sampling["top_k"], sampling["top_p"])
        pairs = [(list(r["prompt_ids"]), list(r["completion_ids"])) for r in report["rollouts"]]
        logged = {
            side: [torch.tensor(r[f"{side}_logprobs"], dtype=torch.float32) for r in report["rollouts"]] for side in ("sampler", "trainer")
        }
        dtype, precision = DTYPES[name], PrecisionConfig.model_validate(report["config"].get("precision", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"verify: {case} holds no readable mismatch.json ({error})") from None
    loaded = load_decoder(case, dtype, device)
    tiles.follow(precision.tiles)
    decoder = Decoder(loaded.config, loaded.flat.detach(), loaded.layout, precision.numerics())
    ways = {
        "together": _score(decoder, pairs, dist),
        "alone": [_score(decoder, [p], dist)[0] for p in pairs],
        "decoded": cached_scores(decoder, pairs, dist, 1),
    }
    checks = []
    for side, values in logged.items():
        for way, scores in ways.items():
            checks.append(Check(f"{side}'s logprobs, scored again {way}", name))
            _compare_all(checks[-1], values, scores)
    return checks
