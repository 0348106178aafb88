"""The native sampler with quantised keys and values: no bit depends on what stands beside a token."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import RngKey, complete
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.model.blocks import attention
from zerokl.model.decoder import Decoder, Numerics
from zerokl.model.kv_rounding import quantised_kv
from zerokl.model.quantisation import KvQuantisation
from zerokl.model.scoring import logprobs, pack

from tests.engine.rollout.test_native import PROMPT, SAMPLING, bits, generation_params
from tests.engine.rollout.test_prefix_cache import Game, Turn
from tests.helpers import property_settings

HOW = ["float8_e4m3fn/unit", "float8_e5m2/token", "int8/token_head/pow2"]


def quantised(decoder: Decoder, text: str) -> Decoder:
    how = Numerics(kv=KvQuantisation.parse(text))
    return Decoder(decoder.config, decoder.flat.detach(), decoder.layout, how)


def scores(decoder: Decoder, rollouts: list) -> bytes:
    with torch.no_grad():
        return logprobs(decoder, pack([r.pair for r in rollouts]), SAMPLING[0])[0].numpy().tobytes()


@property_settings(12)
@given(
    text=st.sampled_from(HOW),
    prompts=st.lists(PROMPT, min_size=1, max_size=3),
    concurrency=st.integers(1, 7),
    batch_tokens=st.integers(1, 60),
)
def test_batch_and_chunks_change_no_bit_and_the_trainer_has_the_same(
    decoder, text, prompts, concurrency, batch_tokens
):
    rounding, key, params = quantised(decoder, text), RngKey(3, 5), generation_params(max_tokens=8)
    rollouts = complete(NativeSampler(rounding), prompts, params, key)
    chunked = complete(NativeSampler(rounding, concurrency, batch_tokens), prompts, params, key)
    assert bits(chunked) == bits(rollouts)
    drawn = np.concatenate([r.logprobs for r in rollouts]).tobytes()
    assert scores(rounding, rollouts) == drawn
    longest = max(len(r.ids) for r in rollouts)
    assert longest < 3 or scores(decoder, rollouts) != drawn, "control: a trainer that rounds nothing"


@pytest.mark.full
@pytest.mark.parametrize("text", HOW)
def test_later_turns_read_quantised_blocks_that_were_kept(decoder, text):
    game = Game(quantised(decoder, text), max_batch_tokens=7)
    prompt = tuple(range(6, 6 + KEY_TILE + 3))
    assert game.play([Turn(0, prompt, 20), Turn(1, prompt[:5], 4)]) == 0
    assert game.play([Turn(0, (9, 10), 20), Turn(1, (9,), 30)]) == 0
    assert game.sampler.tokens_cached >= KEY_TILE
    assert game.play([Turn(1, (7,), 8)]) == 0


@pytest.mark.full
def test_control_a_scale_of_all_tokens_is_seen(decoder, monkeypatch):
    """One scale from the largest of a whole pass depends on the chunks, so the property fails."""
    how = KvQuantisation("int8", "token")

    def of_the_tensor(x: torch.Tensor, numerics: Numerics) -> torch.Tensor:
        return quantised_kv(x.reshape(1, -1, x.shape[2]), how).view(x.shape).to(x.dtype)

    monkeypatch.setattr(attention, "rounded_kv", of_the_tensor)
    rounding, prompts, params = quantised(decoder, "int8/token"), [list(range(6, 26))], generation_params()
    whole, chunked = (complete(NativeSampler(rounding, 4, n), prompts, params, RngKey(3, 5)) for n in (64, 7))
    assert bits(whole) != bits(chunked)
