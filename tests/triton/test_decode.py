"""Decoding turns on Triton, interpreted and without a graph: their bits (with graphs: test_graphs.py)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.rollout import decode
from zerokl.engine.rollout.decode import DecodeMemory, DecodeRows, Row
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import DrawParams, GenerationParams, RngKey, Rollout, complete
from zerokl.kernels.matmul import UNPACKED
from zerokl.kernels.philox import Stream
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.uniforms import uniforms, uniforms_ref
from zerokl.model.decoder import Decoder
from zerokl.model.scoring import logprobs, pack

from tests.helpers import property_settings, total_unequal
from tests.triton.test_model import _decoder

# A fifth of the vocabulary, so that completions end at different turns, before and after a look.
STOP = frozenset(range(12))
ALL = SamplingParams()
PROMPTS = st.lists(st.lists(st.integers(12, 60), min_size=1, max_size=24), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return _decoder(torch.bfloat16)


def params(sampling_params: SamplingParams = ALL, max_tokens: int = 11) -> GenerationParams:
    return GenerationParams(sampling_params, 2, max_tokens, STOP)


def bits(rollouts: list[Rollout]) -> list[tuple]:
    return [(r.prompt, r.sample, r.completion_ids, r.logprobs.tobytes(), r.finish) for r in rollouts]


@property_settings(20)
@given(
    rows=st.lists(st.tuples(*[st.integers(0, (1 << 32) - 1)] * 4), min_size=1, max_size=300),
    seed=st.integers(0, (1 << 32) - 1),
    stream=st.sampled_from(Stream),
)
def test_uniform_numbers_of_the_device_are_the_hosts(rows, seed, stream):
    counter = torch.tensor(rows).T.contiguous()
    assert total_unequal([uniforms(counter, seed, stream)], [uniforms_ref(counter, seed, stream)]) == 0
    assert total_unequal([uniforms(counter, seed, stream)], [uniforms_ref(counter, seed ^ 1, stream)]) > 0


@pytest.mark.full
@property_settings(2)
@given(prompts=PROMPTS, concurrency=st.integers(1, 6), look_every=st.integers(1, 8))
def test_rows_buckets_and_looks_change_no_bit(decoder, prompts, concurrency, look_every):
    expected = bits(complete(NativeSampler(decoder), prompts, params(), RngKey(1, 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "LOOK_EVERY", look_every)
        rollouts = complete(NativeSampler(decoder, concurrency), prompts, params(), RngKey(1, 2))
    assert bits(rollouts) == expected


def looked(decoder: Decoder) -> tuple[list[tuple], list[str]]:
    """What is drawn with a look every other turn, and the order of turns and looks."""
    looks, read, run = [], decode.Look.read, DecodeRows.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "LOOK_EVERY", 2)
        patch.setattr(decode.Look, "read", lambda look: looks.append("read") or read(look))
        patch.setattr(DecodeRows, "run", lambda rows, turns: looks.append("run") or run(rows, turns))
        rollouts = complete(NativeSampler(decoder), [[20] * 3, [30, 31]], params(max_tokens=6), RngKey(1, 2))
    return bits(rollouts), looks


@pytest.fixture(scope="module")
def ahead(decoder) -> tuple[list[tuple], list[str]]:
    return looked(decoder)


def test_turns_that_are_launched_before_a_look_is_read_change_no_bit(decoder, ahead, monkeypatch):
    assert ahead[1][:4] == ["read", "run", "run", "read"]  # the first token, and then two looks in flight
    monkeypatch.setattr(DecodeRows, "looks_ahead", 0)
    drawn, looks = looked(decoder)
    assert drawn == ahead[0]
    assert looks[:3] == ["read", "run", "read"]


def test_control_a_look_that_does_not_copy_shows_later_tokens(decoder, ahead, monkeypatch):
    def shows_the_memory(look, ids, logprobs):
        look._event, look._columns = None, [ids, logprobs]

    monkeypatch.setattr(decode.Look, "__init__", shows_the_memory)
    assert looked(decoder)[0] != ahead[0]


@pytest.mark.parametrize(
    "sampling_params",
    [
        *(
            pytest.param(x, marks=pytest.mark.full)
            for x in (SamplingParams(), SamplingParams(0.7), SamplingParams(1.0, 5, 0.9))
        ),
        SamplingParams.of(0.9, 20, 0.95, 0.02, {3: 2.0, 40: -1.0}, range(0, 61, 2)),
    ],
)
def test_the_trainers_logprobs_are_the_samplers(decoder, sampling_params):
    prompts = [[20] * 33, [30, 31]]
    rollouts = complete(NativeSampler(decoder), prompts, params(sampling_params), RngKey(1, 2))
    with torch.no_grad():
        logp, _ = logprobs(decoder, pack([r.pair for r in rollouts]), sampling_params)
    assert logp.numpy().tobytes() == np.concatenate([r.logprobs for r in rollouts]).tobytes()


def test_a_row_that_is_done_or_padding_writes_to_its_own_pages_only(decoder):
    memory = DecodeMemory(decoder, rows=3, pages=2, blocks=6)
    pages = [memory.cache.allocate(2) for _ in range(3)]
    rows = [Row(20 + i, 0, 0, 11, RngKey(0, 0, sample=i), pages[i]) for i in range(3)]
    turns = DecodeRows(decoder, memory, DrawParams(SamplingParams(), frozenset()), 0, Stream.SAMPLE)
    turns.start(UNPACKED)
    turns.load(rows)
    for _ in range(2):
        turns.run(8)
    assert memory.state[decode._Field.POSITION].tolist() == [10, 10, 10, 0]
    by_block = memory.cache.data.view(2, memory.cache.blocks, 2, 2, 32, 16)
    written = by_block.abs().amax(dim=(0, 2, 3, 5)) > 0  # [blocks, KEY_TILE]
    assert written[[page for page, _ in pages]].sum(dim=1).tolist() == [11, 11, 11]
    assert not written[[page for _, page in pages]].any()
    assert written[memory.padding_page].sum() == 1
