"""The native sampler of a model whose layers keep a state: slots, turns, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.engine.runs.init import random_decoder
from zerokl.engine.runs.samplers import refuse_states
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache
from zerokl.model.decoder import Decoder
from zerokl.model.scoring import logprobs, pack

PARAMS = GenerationParams(SamplingParams(), 3, 20, frozenset(range(6)))
# Read to the middle of a chunk, to its end, and beyond it.
PROMPTS = [[9] * 7, [8, 7, 10] * 20 + [11] * 4, [12, 13] * 40]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return random_decoder("qwen3_5_text", 40, 0, {"hidden_size": 64, "num_hidden_layers": 2})


def bits(decoder: Decoder, **limits: int) -> list[tuple]:
    rollouts = complete(NativeSampler(decoder, **limits), PROMPTS, PARAMS, RngKey(0, 0))
    return [(r.ids, r.logprobs.tobytes(), r.finish) for r in rollouts]


def test_concurrency_and_chunks_change_no_bit_and_the_trainer_agrees(decoder):
    expected = bits(decoder)
    assert bits(decoder, max_concurrency=2, max_batch_tokens=13) == expected
    rollouts = complete(NativeSampler(decoder), PROMPTS, PARAMS, RngKey(0, 0))
    with torch.no_grad():
        logp = logprobs(decoder, pack([r.pair for r in rollouts]), SamplingParams())[0]
    assert logp.numpy().tobytes() == np.concatenate([r.logprobs for r in rollouts]).tobytes()


def test_control_samples_that_do_not_copy_the_slot_of_their_prompt_are_seen(decoder, monkeypatch):
    expected = bits(decoder)
    monkeypatch.setattr(BlockCache, "copy_slots", lambda cache, sources, targets: None)
    assert bits(decoder) != expected


@pytest.mark.full
def test_turns_read_everything_again_and_give_their_slots_back(decoder, monkeypatch):
    caches, make = [], BlockCache.__init__
    monkeypatch.setattr(BlockCache, "__init__", lambda c, *a, **k: (caches.append(c), make(c, *a, **k))[1])
    sampler, requests = NativeSampler(decoder), PARAMS.requests(PROMPTS, RngKey(0, 0))
    in_turns = [replace(request, trajectory_tokens=200) for request in requests]
    first = [c.ids for c in sampler.generate(in_turns)]
    assert first == [c.ids for c in NativeSampler(decoder).generate(requests)]
    following = [
        replace(r, ids=(*r.ids, *ids, 14), drawn=len(ids)) for r, ids in zip(in_turns, first, strict=True)
    ]
    again = sampler.generate(following)
    assert sampler.tokens_cached == 0
    alone = [NativeSampler(decoder).generate([request])[0] for request in following]
    assert [c.logprobs.tobytes() for c in again] == [c.logprobs.tobytes() for c in alone]
    for cache in caches:
        slots = next(iter(cache.states.values())).tensors["start"].shape[0]
        assert sorted(cache.free_slots) == list(range(slots))


def test_guesses_are_refused(decoder):
    with pytest.raises(ValueError, match=r"speculate \(2\) must be 0 for a Qwen3_5ForCausalLM"):
        NativeSampler(decoder, speculate=2)


def test_a_cache_without_room_for_the_states_is_refused(decoder):
    slot = BlockCache.bytes_per_slot(decoder.config, torch.float32)
    with pytest.raises(ValueError, match=r"states of 10 samples .* or max_concurrency"):
        bits(decoder, cache_bytes=9 * slot)
    assert bits(decoder, max_concurrency=1, cache_bytes=9 * slot) == bits(decoder)


class _Sampler:
    """The settings that the refusal reads."""

    def __init__(self, sampler: str):
        self.sampler = sampler


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("vllm", r'sampler \("vllm"\): Q: its prefill and its decode'),
        ("vllm-exact", r'sampler \("vllm-exact"\): Q: vLLM\'s batch-invariant mode has no'),
        ("vllm-zerokl", 'no place for the states .*; set sampler = "native"'),
    ],
)
def test_engines_without_the_state_are_refused(sampler, message):
    with pytest.raises(ValueError, match=message):
        refuse_states(_Sampler(sampler), "Q")
