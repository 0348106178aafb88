"""The native sampler: a completion depends on its own prompt, the weights and its own key only."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.rollout.cache_size import cache_limit
from zerokl.engine.rollout.generation import Generation, make_prefixes
from zerokl.engine.rollout.native import NativeSampler, _Completions, _kind
from zerokl.engine.rollout.types import GenerationParams, RngKey, Rollout, complete
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.matmul import matmul
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache
from zerokl.model.checkpoint import load_decoder
from zerokl.model.context import PackedContext
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.scoring import logprobs, pack

from tests.helpers import property_settings

VOCAB, CONTEXT = 64, 512
# 6 of 64 about equally likely tokens, so that completions have very different lengths.
STOP = frozenset(range(6))
SAMPLING = [
    SamplingParams(),
    SamplingParams(0.7),
    SamplingParams(1.0, 0, 0.9),
    SamplingParams(1.3, 7, 1.0),
    SamplingParams(0.0),
]
# Prompts that are shorter than a cache block, longer than one, and longer than two.
PROMPT = st.integers(1, 2 * KEY_TILE + 3).flatmap(
    lambda n: st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n)
)


def generation_params(
    sampling_params: SamplingParams = SAMPLING[0],
    num_generations: int = 3,
    max_tokens: int = 20,
    stop: frozenset[int] = STOP,
) -> GenerationParams:
    return GenerationParams(sampling_params, num_generations, max_tokens, stop)


def bits(rollouts: list[Rollout]) -> list[tuple]:
    return [
        (r.prompt, r.sample, r.prompt_ids, r.completion_ids, r.logprobs.tobytes(), r.finish) for r in rollouts
    ]


def tokens(rollouts: list[Rollout]) -> list[tuple[int, ...]]:
    return [r.completion_ids for r in rollouts]


@property_settings(15)
@given(
    prompts=st.lists(PROMPT, min_size=1, max_size=4),
    sampling_params=st.sampled_from(SAMPLING),
    concurrency=st.integers(1, 14),
    batch_tokens=st.integers(1, 100),
)
def test_concurrency_and_chunks_do_not_change_a_bit(
    decoder, sampler, prompts, sampling_params, concurrency, batch_tokens
):
    chunked = NativeSampler(decoder, concurrency, batch_tokens)
    rng_key, params = RngKey(3, 5), generation_params(sampling_params)
    assert bits(complete(chunked, prompts, params, rng_key)) == bits(
        complete(sampler, prompts, params, rng_key)
    )


@property_settings(15)
@given(
    prompt=PROMPT,
    place=st.integers(0, 2),
    beside=st.lists(PROMPT, min_size=2, max_size=4),
    num_generations=st.integers(2, 5),
)
def test_prompts_and_samples_beside_it_do_not_change_a_bit(sampler, prompt, place, beside, num_generations):
    *_, alone = complete(
        sampler, [*[[1]] * place, prompt], generation_params(num_generations=1), RngKey(0, 0)
    )
    before = beside[:place]
    crowd = complete(
        sampler,
        [*before, *[[2]] * (place - len(before)), prompt, *beside],
        generation_params(num_generations=num_generations),
        RngKey(0, 0),
    )
    assert bits([crowd[place * num_generations]]) == bits([alone])


@property_settings(15)
@given(prompts=st.lists(PROMPT, min_size=1, max_size=3), sampling_params=st.sampled_from(SAMPLING))
def test_the_trainers_logprobs_are_the_samplers(decoder, sampler, prompts, sampling_params):
    rollouts = complete(sampler, prompts, generation_params(sampling_params), RngKey(0, 0))
    with torch.no_grad():
        logp, _ = logprobs(decoder, pack([r.pair for r in rollouts]), sampling_params)
    assert logp.numpy().tobytes() == np.concatenate([r.logprobs for r in rollouts]).tobytes()


def test_rollouts_come_prompt_by_prompt_and_sample_by_sample(sampler):
    rollouts = complete(sampler, [[9, 8], [7]], generation_params(), RngKey(0, 0))
    assert [(r.prompt, r.sample, r.prompt_ids) for r in rollouts] == [
        (p, g, ids) for p, ids in ((0, (9, 8)), (1, (7,))) for g in range(3)
    ]
    assert complete(sampler, [], generation_params(), RngKey(0, 0)) == []


def test_every_part_of_the_key_matters(sampler):
    prompts, params = [[9, 9, 9], [9, 9, 9]], generation_params(num_generations=4, stop=frozenset())
    base = tokens(complete(sampler, prompts, params, RngKey(0, 0)))
    assert len(set(base)) == 8, "samples of a group, and groups of one text, must differ"
    assert tokens(complete(sampler, prompts, params, RngKey(0, 0))) == base
    for rng_key in (RngKey(1, 0), RngKey(0, 1)):
        assert not set(base) & set(tokens(complete(sampler, prompts, params, rng_key)))


def test_first_tokens_follow_the_distribution(decoder, sampler):
    prompt, n, sampling_params = [9, 30, 12], 4000, SamplingParams(0.2)
    rollouts = complete(sampler, [prompt], generation_params(sampling_params, n, 1), RngKey(0, 0))
    drawn = [ids[0] for ids in tokens(rollouts)]
    with torch.no_grad():
        logp, _ = logprobs(decoder, pack([(prompt, [v]) for v in range(VOCAB)]), sampling_params)
    expected = n * logp.double().exp().numpy()
    chi2 = (((np.bincount(drawn, minlength=VOCAB) - expected) ** 2) / expected).sum()
    assert chi2 < 103.4  # 99.9% of the chi-squared distribution with 63 degrees of freedom


def test_a_completion_ends_with_its_first_stop_token_or_at_the_limit(sampler):
    params = generation_params(num_generations=40, max_tokens=8)
    rollouts = complete(sampler, [[9, 8, 7]], params, RngKey(0, 0))
    assert {r.finish for r in rollouts} == {"stop", "length"}
    for r in rollouts:
        assert len(r.logprobs) == len(r.completion_ids)
        assert not STOP & set(r.completion_ids[:-1])
        if r.finish == "stop":
            assert r.completion_ids[-1] in STOP
        else:
            assert len(r.completion_ids) == 8
            assert r.completion_ids[-1] not in STOP


def test_stop_ids_and_limit_only_cut(sampler):
    without_stop = generation_params(num_generations=20, max_tokens=12, stop=frozenset())
    whole = complete(sampler, [[9, 8, 7]], without_stop, RngKey(0, 0))
    cut = complete(sampler, [[9, 8, 7]], generation_params(num_generations=20, max_tokens=5), RngKey(0, 0))
    for long, short in zip(whole, cut, strict=True):
        n = len(short.completion_ids)
        assert long.completion_ids[:n] == short.completion_ids
        assert long.logprobs[:n].tobytes() == short.logprobs.tobytes()


def test_greedy_takes_the_most_likely_token_each_time(decoder, sampler):
    prompt = [9, 8, 7]
    greedy = generation_params(SamplingParams(0.0), 2, 10, frozenset())
    a, b = complete(sampler, [prompt], greedy, RngKey(0, 0))
    assert a.completion_ids == b.completion_ids
    ids = list(prompt)
    with torch.no_grad():
        for token in a.completion_ids:
            hidden = decoder.hidden(torch.tensor(ids), PackedContext([len(ids)], decoder.config))
            assert token == int(matmul(hidden[-1:], decoder.lm_head).argmax())
            ids.append(token)


def test_top_k_and_top_p_keep_to_the_likely_tokens(decoder, sampler):
    prompt = [9, 8, 7]
    with torch.no_grad():
        logp, _ = logprobs(decoder, pack([(prompt, [v]) for v in range(VOCAB)]), SamplingParams(0.2))
    likely = logp.sort(descending=True).values
    # top_k keeps every logit that is not below the fifth, ties included.
    top_k = int((logp >= likely[4]).sum())
    top_p = 1 + int((likely.double().exp().cumsum(0) < 0.3).sum())
    for sampling_params, kept in ((SamplingParams(0.2, 5), top_k), (SamplingParams(0.2, 0, 0.3), top_p)):
        rollouts = complete(sampler, [prompt], generation_params(sampling_params, 300, 1), RngKey(0, 0))
        drawn = {ids[0] for ids in tokens(rollouts)}
        assert len(drawn) == kept
        assert logp[list(drawn)].min() >= likely[kept - 1]


def _cache_bytes(decoder, prompt: int, max_tokens: int, samples: int) -> int:
    """Bytes of the cache that one prompt and some samples of it need: its full blocks are there once."""
    shared, read = prompt // KEY_TILE, -(-prompt // KEY_TILE)
    blocks = read + samples * (-(-(prompt + max_tokens - 1) // KEY_TILE) - shared)
    return blocks * BlockCache.bytes_per_block(decoder.config, decoder.cache_dtype)


@pytest.mark.parametrize("prompt", [1, 20, KEY_TILE, KEY_TILE + 1, 2 * KEY_TILE + 6])
@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_small_cache_lowers_concurrency_and_changes_no_bit(decoder, sampler, prompt, at_once):
    prompts, params, rng_key = [[9] * prompt, [8] * (1 + prompt // 4)], generation_params(), RngKey(0, 0)
    expected = bits(complete(sampler, prompts, params, rng_key))
    small = NativeSampler(decoder, cache_bytes=_cache_bytes(decoder, prompt, params.max_tokens, at_once))
    assert bits(complete(small, prompts, params, rng_key)) == expected
    assert small.samples_at_once == at_once


def _memories(sampler, prompts: list[list[int]], params: GenerationParams, calls: int) -> list:
    """The memory of each of some equal calls, kept from call to call as on a GPU."""
    requests, memories = params.requests(prompts, RngKey(0, 0)), []
    for _ in range(calls):
        sampler._memory = sampler._make_memory(make_prefixes(enumerate(requests)))
        memories.append(sampler._memory)
    return memories


@pytest.mark.parametrize("samples", [1, 3, 24], ids="a cache for {} samples".format)
def test_a_memory_is_kept_where_the_limit_of_the_cache_binds(decoder, samples):
    prompts, params = [[9] * 20] * 8, generation_params()
    size = _cache_bytes(decoder, 20, params.max_tokens, samples)
    sampler = NativeSampler(decoder, cache_bytes=size)
    first, *later = _memories(sampler, prompts, params, 4)
    assert all(memory is first for memory in later)


def test_a_memory_that_was_kept_holds_no_sample_that_is_too_long(decoder):
    sampler = NativeSampler(decoder, cache_bytes=_cache_bytes(decoder, 20, 20, 3))
    _memories(sampler, [[9] * 20] * 8, generation_params(), 1)
    with pytest.raises(ValueError, match="cannot hold one sample of 420 tokens"):
        _memories(sampler, [[9] * 20], generation_params(max_tokens=400), 1)


def test_control_a_memory_that_must_hold_every_sample_is_made_again(decoder):
    prompts, params = [[9] * 20] * 8, generation_params()
    sampler = NativeSampler(decoder, cache_bytes=_cache_bytes(decoder, 20, params.max_tokens, 3))
    (first,) = _memories(sampler, prompts, params, 1)
    sampler._fit = 1 << 40  # so that all that is wanted must be there
    assert _memories(sampler, prompts, params, 1) != [first]


def _pretend_gpu(monkeypatch, allocated: int, reserved: int) -> None:
    """The figures of a GPU of 100,000 bytes that nobody else uses, and of torch's allocator on it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000 - reserved, 100_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)


def test_what_torch_holds_and_does_not_use_counts_as_free(monkeypatch):
    device = torch.device("cuda", 0)
    _pretend_gpu(monkeypatch, allocated=20_000, reserved=20_000)
    assert cache_limit(0, device) == 24_000
    _pretend_gpu(monkeypatch, allocated=20_000, reserved=95_000)  # after a step of training
    assert cache_limit(0, device) == 24_000
    _pretend_gpu(monkeypatch, allocated=95_000, reserved=95_000)  # control: what tensors have is not free
    assert cache_limit(0, device) == 1_500
    assert cache_limit(7, device) == 7


def test_a_cache_too_small_for_one_sample_is_refused(decoder):
    size = _cache_bytes(decoder, 20, 20, 1)
    with pytest.raises(ValueError, match=f"cache_bytes \\({size - 1}\\) cannot hold one sample of 40 tokens"):
        complete(NativeSampler(decoder, cache_bytes=size - 1), [[9] * 20], generation_params(), RngKey(0, 0))


def test_a_narrower_cache_holds_twice_as_many_samples_and_draws_the_same(model):
    plain = load_decoder(model, torch.float32)
    narrow = Decoder(plain.config, plain.flat.detach(), plain.layout, Numerics(cache=torch.bfloat16))
    prompts, params, rng_key = [[9] * 20, [8] * 5], generation_params(), RngKey(0, 0)
    size = _cache_bytes(plain, 20, params.max_tokens, 1)
    small_plain, small_narrow = (NativeSampler(d, cache_bytes=size) for d in (plain, narrow))
    expected = bits(complete(NativeSampler(narrow), prompts, params, rng_key))
    assert bits(complete(small_narrow, prompts, params, rng_key)) == expected
    complete(small_plain, prompts, params, rng_key)
    assert (small_plain.samples_at_once, small_narrow.samples_at_once) == (1, 2)


@property_settings(15)
@given(
    prompts=st.lists(PROMPT, min_size=1, max_size=4),
    num_generations=st.integers(1, 5),
    concurrency=st.integers(1, 9),
    tokens=st.integers(1, 40),
)
def test_every_cache_block_is_free_at_the_end(decoder, prompts, num_generations, concurrency, tokens):
    sampler, rng_key = NativeSampler(decoder, concurrency, tokens), RngKey(0, 0)
    params = generation_params(num_generations=num_generations, max_tokens=9)
    requests = params.requests(prompts, rng_key)
    prefixes = make_prefixes(enumerate(requests))
    memory = sampler._make_memory(prefixes)
    with torch.no_grad():
        decoding = sampler._decoding_of(memory, _kind(requests[0]))
        completions = _Completions()
        fits = bool  # no request comes
        Generation(decoding, prefixes, completions, fits, sampler.limits, 0, sampler.stopwatch).run()
    assert len(completions.by_place) == len(requests)
    assert memory.cache.free == memory.cache.blocks > 0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[9], []], "prompt 1 is empty"),
        (
            [[9] * (CONTEXT - 19)],
            f"prompt 0 has {CONTEXT - 19} tokens, "
            f"with max_tokens \\(20\\) more than the context \\({CONTEXT}\\)",
        ),
        ([[9], [VOCAB]], f"prompt 1 has token id {VOCAB}, outside the model's vocabulary of {VOCAB}"),
        ([[-1]], "prompt 0 has token id -1"),
    ],
)
def test_bad_prompts_are_refused_by_number(sampler, prompts, message):
    with pytest.raises(ValueError, match=message):
        complete(sampler, prompts, generation_params(), RngKey(0, 0))


def test_a_prompt_may_fill_the_context(sampler):
    params = generation_params(num_generations=1, stop=frozenset())
    (rollout,) = complete(sampler, [[9] * (CONTEXT - 20)], params, RngKey(0, 0))
    assert len(rollout.completion_ids) == 20


@pytest.mark.parametrize(
    "params",
    [
        dict(max_tokens=0),
        dict(num_generations=0),
        dict(sampling_params=SamplingParams(-1.0)),
        dict(sampling_params=SamplingParams(1.0, 0, 0.0)),
    ],
)
def test_settings_out_of_range_are_refused(sampler, params):
    with pytest.raises(ValueError, match="must"):
        complete(sampler, [[9]], generation_params(**params), RngKey(0, 0))


def test_new_weights_give_new_tokens_and_their_version(decoder):
    copy = Decoder(decoder.config, decoder.flat.detach().clone(), decoder.layout)
    sampler, params = NativeSampler(copy), generation_params(stop=frozenset())
    before = complete(sampler, [[9]], params, RngKey(0, 0))
    copy.flat.neg_()
    sampler.sync_weights(7)
    after = complete(sampler, [[9]], params, RngKey(0, 0))
    assert {r.weight_version for r in before} == {0}
    assert {r.weight_version for r in after} == {7}
    assert tokens(before) != tokens(after)
