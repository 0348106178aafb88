"""The native sampler and the trainer with attention in chunks: a token's bits depend on its context only."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import RngKey, complete
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.attention_rule import AttentionRule
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.scoring import cached_scores, logprobs, pack

from tests.engine.rollout.test_native import SAMPLING, bits, generation_params
from tests.engine.rollout.test_prefix_cache import TOTAL, Game, Turn, block_bytes
from tests.helpers import property_settings

# Of several chunks, so that a prompt's chunks are shared and cut.
PROMPT = st.lists(st.integers(6, 60), min_size=1, max_size=3 * KEY_TILE)


def chunked(decoder: Decoder, chunk: int = KEY_TILE) -> Decoder:
    numerics = Numerics(attention=AttentionRule(chunk))
    return Decoder(decoder.config, decoder.flat.detach(), decoder.layout, numerics)


def scores(decoder: Decoder, rollouts: list) -> bytes:
    with torch.no_grad():
        return logprobs(decoder, pack([r.pair for r in rollouts]), SAMPLING[0])[0].numpy().tobytes()


@property_settings(10)
@given(
    prompts=st.lists(PROMPT, min_size=1, max_size=3),
    concurrency=st.integers(1, 7),
    batch_tokens=st.integers(1, 60),
)
def test_batch_and_chunks_change_no_bit_and_the_trainer_has_the_same(
    decoder, prompts, concurrency, batch_tokens
):
    joined, key, params = chunked(decoder), RngKey(3, 5), generation_params(max_tokens=20)
    rollouts = complete(NativeSampler(joined), prompts, params, key)
    in_parts = complete(NativeSampler(joined, concurrency, batch_tokens), prompts, params, key)
    assert bits(in_parts) == bits(rollouts)
    drawn = np.concatenate([r.logprobs for r in rollouts]).tobytes()
    assert scores(joined, rollouts) == drawn
    assert b"".join(scores(joined, [r]) for r in rollouts) == drawn
    pairs = [r.pair for r in rollouts]
    by_token = cached_scores(joined, pairs, SAMPLING[0], 1)
    assert torch.cat(list(by_token)).numpy().tobytes() == drawn


def test_control_a_trainer_with_another_chunk_has_other_bits(decoder):
    prompts, params = [[20] * 50 + [30] * 40], generation_params(max_tokens=20)
    rollouts = complete(NativeSampler(chunked(decoder)), prompts, params, RngKey(3, 5))
    drawn = np.concatenate([r.logprobs for r in rollouts]).tobytes()
    same, walk, other = (
        scores(d, rollouts) == drawn for d in (chunked(decoder), decoder, chunked(decoder, 64))
    )
    assert same
    assert decoder.dtype != torch.float32 or not (walk or other)


@pytest.mark.full
def test_later_turns_read_blocks_that_were_kept_or_were_evicted(decoder):
    """The second sampler has room for one trajectory, so the blocks of the other one go."""
    prompt = tuple(range(6, 6 + KEY_TILE + 3))
    for settings in ({}, {"cache_bytes": (TOTAL // KEY_TILE + 1) * block_bytes(decoder)}):
        game = Game(chunked(decoder), max_batch_tokens=7, **settings)
        assert game.play([Turn(0, prompt, 20), Turn(1, prompt[:5], 4)]) == 0
        assert game.play([Turn(0, (9, 10), 20), Turn(1, (9,), 30)]) == 0
        assert game.play([Turn(1, (7,), 8), Turn(0, (8,), 9)]) == 0
