"""`zerokl verify`: the law's checks on this machine, for one model in each dtype.

Every check computes the log-probabilities of the same tokens (or gradients, or samples) in two ways, and
compares bits. The law says that the difference between the two ways must not matter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from ....files.reading import json_number, one_line, read_json
from ....kernels.backend import find_device
from ....kernels.philox import Stream, permutation, uniform_range
from ....kernels.sampling_params import SamplingParams, bias_by_id
from ....model.checkpoint import DTYPES, load_decoder, resolve_model
from ....model.decoder import Decoder
from ....model.numerics import named_numerics
from ....model.scoring import cached_scores, logprobs, pack
from ....verify.invariance import Check
from ...config.loss_section import LossConfig
from ...config.precision_section import PrecisionConfig, full_dtype
from ...rollout.native import NativeSampler
from ...rollout.types import GenerationParams, RngKey, Rollout, complete
from ...train.losses.advantage import of_tokens
from ...train.losses.policy_loss import sequence_weights
from ...train.parallel.workers import Workers, cpu_threads, suits
from ...train.shard import Shard, ShardWork
from ..init import random_decoder

Pair = tuple[list[int], list[int]]
_SAMPLING_PARAMS = (
    SamplingParams(),
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
    folder, checks = None if model is None else resolve_model(model), []
    for check in run_checks(folder, dtypes, sequences, longest, seed, find_device(device)):
        checks.append(check)
        if progress:
            progress(
                [check.dtype, check.name, f"{check.comparisons:,} comparisons, {check.unequal:,} unequal"]
            )
    return checks


def count_checks(dtypes: Sequence[str]) -> int:
    """The number of checks that check_law does."""
    return len(_CHECKS) * len(dtypes)


def run_checks(
    model: Path | None,
    dtypes: Sequence[str],
    sequences: int = 12,
    longest: int = 80,
    seed: int = 0,
    device: torch.device | None = None,
) -> Iterator[Check]:
    """Run every check in every dtype. Yields each check when it has finished.

    model: a model folder; None takes a tiny random model. Raises ValueError.
    """
    if sequences < 1 or longest < 2:
        raise ValueError(
            f"verify: sequences ({sequences}) must be at least 1 and longest ({longest}) at least 2 tokens"
        )
    for name in dtypes:
        decoder = _decoder(model, DTYPES[name], seed, device)
        length = min(longest, decoder.config.max_positions)
        pairs = random_pairs(sequences, length, decoder.config.vocab_size, seed)
        for check in _CHECKS:
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
def _score(decoder: Decoder, pairs: Sequence[Pair], sampling_params: SamplingParams) -> list[torch.Tensor]:
    """logp [completion tokens] of each pair, scored together; on the CPU."""
    batch = pack(pairs)
    return list(logprobs(decoder, batch, sampling_params)[0].cpu().split(batch.drawn_lengths))


def _compare_all(check: Check, left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        check.compare(a, b)


def _composition(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check = Check("batch composition", dtype)
    for sampling_params in _SAMPLING_PARAMS:
        _compare_all(
            check,
            _score(decoder, pairs, sampling_params),
            [_score(decoder, [pair], sampling_params)[0] for pair in pairs],
        )
    return check


def _order(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check = Check("order in the batch", dtype)
    together = _score(decoder, pairs, SamplingParams())
    for draw in range(3):
        order = permutation(len(pairs), seed, Stream.VERIFY, word=1000 + draw)
        shuffled = _score(decoder, [pairs[i] for i in order], SamplingParams())
        _compare_all(check, [together[i] for i in order], shuffled)
    return check


def _padding(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    """Tokens that are appended to a sequence must not change the tokens before them."""
    check = Check("padding", dtype)
    together = _score(decoder, pairs, SamplingParams())
    limit = decoder.config.max_positions
    for extra in (1, 15, 33):
        padded = [(p, [*c, *[0] * min(extra, limit - len(p) - len(c))]) for p, c in pairs]
        _compare_all(
            check,
            together,
            [a[: len(c)] for a, (_, c) in zip(_score(decoder, padded, SamplingParams()), pairs, strict=True)],
        )
    return check


def _chunked(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check = Check("chunked prefill", dtype)
    for sampling_params in _SAMPLING_PARAMS:
        together = _score(decoder, pairs, sampling_params)
        for chunk in (7, 32):
            _compare_all(check, together, cached_scores(decoder, pairs, sampling_params, chunk))
    return check


def _decode(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check = Check("decode against prefill", dtype)
    for sampling_params in _SAMPLING_PARAMS:
        _compare_all(
            check, _score(decoder, pairs, sampling_params), cached_scores(decoder, pairs, sampling_params, 1)
        )
    return check


def _threads(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check = Check("threads", dtype)
    together = _score(decoder, pairs, SamplingParams())
    for threads in (1, 2, 3, 4):
        with cpu_threads(threads):
            _compare_all(check, together, _score(decoder, pairs, SamplingParams()))
    return check


def _concurrency(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    """Sampled tokens and their logprobs must not depend on what is sampled beside them.

    The trainer's logprobs of these tokens must be the sampler's.
    """
    check = Check("sampler concurrency", dtype)
    room = decoder.config.max_positions
    for sampling_params in _SAMPLING_PARAMS:
        generation_params = GenerationParams(
            sampling_params, 3, min(24, room - max(len(p) for p, _ in pairs)), frozenset({0})
        )
        prompts, rng_key = [p for p, _ in pairs[:4]], RngKey(seed, 0, Stream.VERIFY_SAMPLE)
        expected = complete(NativeSampler(decoder, 64), prompts, generation_params, rng_key)
        for concurrency, tokens in ((1, 1024), (5, 9)):
            sampler = NativeSampler(decoder, concurrency, tokens)
            rollouts = complete(sampler, prompts, generation_params, rng_key)
            for a, b in zip(expected, rollouts, strict=True):
                n = max(len(a.completion_ids), len(b.completion_ids))
                ids = [torch.tensor([*r.completion_ids, *[-1] * (n - len(r.completion_ids))]) for r in (a, b)]
                check.compare(*ids)
                if a.completion_ids == b.completion_ids:
                    check.compare(torch.from_numpy(a.logprobs), torch.from_numpy(b.logprobs))
        scored = _score(
            decoder, [(list(r.prompt_ids), list(r.completion_ids)) for r in expected], sampling_params
        )
        _compare_all(check, [torch.from_numpy(r.logprobs) for r in expected], scored)
    return check


_SHARDS = 4


def _step(decoder: Decoder, pairs: Sequence[Pair]) -> Shard:
    """The pairs as a training step: rollouts with the trainer's logprobs, advantages and loss weights."""
    scores = _score(decoder, pairs, SamplingParams())
    rollouts = [
        Rollout.of_one_turn(i, 0, prompt, completion, score.numpy(), "length", 0)
        for i, ((prompt, completion), score) in enumerate(zip(pairs, scores, strict=True))
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


def _micro_batch(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check = Check("gradient: micro-batch size", dtype)
    workers, step = Workers(decoder, _SHARDS), _step(decoder, pairs)
    whole = _gradient(workers, step, len(pairs))
    for size in (1, 2):
        check.compare(whole, _gradient(workers, step, size))
    return check


def _gradient_threads(decoder: Decoder, pairs: Sequence[Pair], dtype: str, seed: int) -> Check:
    check, step = Check("gradient: threads and workers", dtype), _step(decoder, pairs)
    expected = _gradient(Workers(decoder, _SHARDS), step, 2)
    can_have_workers = decoder.device.type == "cpu" and suits(decoder.layout.numel)
    threads_and_workers = [(1, 1), (2, 1), (4, 1)] + [(2, 2), (4, 4)] * can_have_workers
    for threads, n in threads_and_workers:
        with cpu_threads(threads), Workers(decoder, _SHARDS, n) as workers:
            check.compare(expected, _gradient(workers, step, 2))
    return check


_CHECKS = (
    _composition,
    _order,
    _padding,
    _chunked,
    _decode,
    _threads,
    _concurrency,
    _micro_batch,
    _gradient_threads,
)


def check_case(case: Path, device: torch.device | None = None) -> list[Check]:
    """Score the rollouts of a saved mismatch again, and compare with what sampler and trainer had computed.

    They are scored together, alone and token by token. Raises ValueError when the folder holds no such case.
    """
    saved = _read_case(case)
    loaded = load_decoder(case, DTYPES[saved.dtype], device)
    decoder = Decoder(
        loaded.config,
        loaded.flat.detach(),
        loaded.layout,
        named_numerics(
            saved.precision.head_dtype,
            saved.precision.cache_dtype,
            saved.precision.tiles,
            saved.precision.router_dtype,
            saved.precision.kv,
        ),
    )
    pairs, sampling_params = saved.pairs, saved.sampling_params
    longest, highest = max(len(p) + len(c) for p, c in pairs), max(max(p + c) for p, c in pairs)
    if longest > decoder.config.max_positions or highest >= decoder.config.vocab_size:
        raise ValueError(
            f"verify: {case} holds a rollout of {longest} tokens up to id {highest}; its model has "
            f"{decoder.config.max_positions} positions and {decoder.config.vocab_size} tokens"
        )
    ways = {
        "together": _score(decoder, pairs, sampling_params),
        "alone": [_score(decoder, [p], sampling_params)[0] for p in pairs],
        "decoded": cached_scores(decoder, pairs, sampling_params, 1),
    }
    checks = []
    for side, logged in saved.logprobs.items():
        for way, scores in ways.items():
            checks.append(Check(f"{side}'s logprobs, scored again {way}", saved.dtype))
            drawn = [x[mask] for x, mask in zip(scores, saved.masks, strict=True)]
            _compare_all(checks[-1], logged, drawn)
    return checks


class _CaseRollout(BaseModel):
    """A rollout of mismatch.json."""

    model_config = ConfigDict(strict=True)

    prompt_ids: list[NonNegativeInt] = Field(min_length=1)
    completion_ids: list[NonNegativeInt] = Field(min_length=1)
    mask: list[Literal[0, 1]]  # which of completion_ids were drawn
    sampling_logprobs: list[float]
    trainer_logprobs: list[float]

    @model_validator(mode="after")
    def _as_long(self) -> "_CaseRollout":
        if len(self.mask) != len(self.completion_ids):
            raise ValueError("must have an entry of the mask for each token of the completion")
        if not sum(self.mask) == len(self.sampling_logprobs) == len(self.trainer_logprobs):
            raise ValueError("must have a logprob of both sides for each drawn token of the completion")
        return self


def _numbers(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout of mismatch.json whose logprobs may be infinite, or NaN."""
    return {name: json_number(value) for name, value in rollout.items()}


@dataclass(frozen=True)
class _Case:
    """A saved mismatch."""

    dtype: str
    precision: PrecisionConfig
    sampling_params: SamplingParams
    pairs: list[Pair]
    masks: list[torch.Tensor]  # which tokens of each completion were drawn, bool
    logprobs: dict[str, list[torch.Tensor]]  # of sampler and trainer, for each pair


def _read_case(case: Path) -> _Case:
    """The mismatch that a run saved in `case`. Raises ValueError."""
    try:
        report = read_json(case / "mismatch.json")
        config = report["config"]
        rollouts = [vars(_CaseRollout.model_validate(_numbers(rollout))) for rollout in report["rollouts"]]
        if config["dtype"] not in DTYPES:
            raise ValueError(f"dtype {config['dtype']} is not known")
        if not rollouts:
            raise ValueError("it holds no rollout")
        sampling = config["sampling"]
        return _Case(
            config["dtype"],
            PrecisionConfig.model_validate(config.get("precision", {})),
            SamplingParams.of(
                sampling["temperature"],
                sampling["top_k"],
                sampling["top_p"],
                sampling.get("min_p", 0.0),
                bias_by_id(sampling.get("logit_bias", {})),
                sampling.get("allowed_token_ids"),
            ).check(),
            [(list(r["prompt_ids"]), list(r["completion_ids"])) for r in rollouts],
            [torch.tensor(r["mask"], dtype=torch.bool) for r in rollouts],
            {
                "sampler": [torch.tensor(r["sampling_logprobs"], dtype=torch.float32) for r in rollouts],
                "trainer": [torch.tensor(r["trainer_logprobs"], dtype=torch.float32) for r in rollouts],
            },
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = one_line(str(error))
        raise ValueError(f"verify: {case} holds no readable mismatch.json ({reason})") from None
