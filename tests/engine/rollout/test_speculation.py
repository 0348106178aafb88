"""Guessed tokens decide no bit, whatever is guessed; and planted faults of their turns are seen."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.rollout import decode, speculation
from zerokl.engine.rollout.generation import Sample
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.speculation import SampleGuesses
from zerokl.engine.rollout.types import GenerationParams, Request, RngKey, Rollout, complete, draw
from zerokl.kernels import backend
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache
from zerokl.model.checkpoint import load_decoder
from zerokl.model.config import ModelConfig
from zerokl.model.decoder import Decoder
from zerokl.model.weights import Layout

from tests.guessers import Guesser, Oracle, hostile
from tests.helpers import property_settings, randn
from tests.random_model import EXPERTS, random_model
from tests.trajectories import in_three_turns

VOCAB, KEY, STOP = 64, RngKey(3, 5), frozenset(range(6))
SAMPLING = [
    SamplingParams(),
    SamplingParams(0.1),
    SamplingParams(0.0),
    SamplingParams.of(1.1, 20, 0.95, 0.02, {3: 2.0, 40: -1.0}, range(0, 61, 2)),
]
PROMPT = st.integers(1, KEY_TILE + 3).flatmap(
    lambda n: st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n)
)
WORTH = speculation._Chance.worth


def bits(rollouts: Sequence[Rollout]) -> list[tuple]:
    return [(r.prompt, r.sample, r.ids, r.logprobs.tobytes(), r.turn_starts, r.finish) for r in rollouts]


def params(sampling_params: SamplingParams = SAMPLING[0], stop: frozenset[int] = STOP, **changes):
    return GenerationParams(
        sampling_params, **{"num_generations": 2, "max_tokens": 12} | changes, stop_ids=stop
    )


def guessed(sampler: NativeSampler) -> tuple[int, int]:
    """Guesses that were made, and those of them that were drawn."""
    return sampler.stopwatch.counts["guesses"], sampler.stopwatch.counts["guesses_drawn"]


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Every guess is worth it, so that a guesser that is always wrong is asked in every turn."""
    monkeypatch.setattr(speculation._Chance, "worth", lambda chance, least: 1 << 20)


@property_settings(12)
@given(
    prompts=st.lists(PROMPT, min_size=1, max_size=3),
    sampling_params=st.sampled_from(SAMPLING),
    stop=st.sampled_from([STOP, frozenset()]),
    k=st.integers(1, 7),
    concurrency=st.integers(1, 6),
    batch_tokens=st.integers(1, 100),
    turns=st.booleans(),
    seed=st.integers(0, 99),
    guesser=st.sampled_from(["texts", "hostile", "right", "wrong", "mostly right"]),
)
def test_no_guesser_changes_a_bit(
    decoder, prompts, sampling_params, stop, k, concurrency, batch_tokens, turns, seed, guesser
):
    play = in_three_turns if turns else complete
    expected = play(NativeSampler(decoder), prompts, params(sampling_params, stop), KEY)
    numbers = np.random.default_rng(seed)
    made = {
        "texts": None,
        "hostile": Guesser(hostile(seed)),
        "right": Oracle(expected),
        "wrong": Oracle(expected, lambda n: True),
        "mostly right": Oracle(expected, lambda n: numbers.random() < 0.2),
    }[guesser]
    sampler = NativeSampler(decoder, concurrency, batch_tokens, speculate=k, guesser=made)
    for _ in range(2):  # the second time TextGuesser knows the texts
        assert bits(play(sampler, prompts, params(sampling_params, stop), KEY)) == bits(expected)
    made_guesses, drawn = guessed(sampler)
    if guesser == "right":
        assert drawn == made_guesses
    if guesser == "wrong":
        assert drawn == 0


def test_right_guesses_save_turns(decoder, monkeypatch):
    prompts, few = [[9] * 20, [5, 6, 7]], params(stop=frozenset(), max_tokens=21)
    expected, turns = complete(NativeSampler(decoder), prompts, few, KEY), []
    run = decode.DecodeRows.run
    monkeypatch.setattr(decode.DecodeRows, "run", lambda rows, n: turns.append(n) or run(rows, n))
    sampler = NativeSampler(decoder, speculate=4, guesser=Oracle(expected))
    assert bits(complete(sampler, prompts, few, KEY)) == bits(expected)
    assert len(turns) == 20 / 5
    assert guessed(sampler) == (4 * 4 * 4, 4 * 4 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("play", [complete, in_three_turns], ids=["one turn", "three turns"])
def test_experts_of_refused_guesses_are_not_named(tmp_path_factory, dtype, play):
    decoder = load_decoder(random_model(tmp_path_factory.mktemp("moe"), EXPERTS, sharper=3.0), dtype)
    prompts, naming = [[5, 6, 7], [9] * 35], params(experts=True)
    expected = play(NativeSampler(decoder), prompts, naming, KEY)
    for guesser in (Guesser(hostile(1)), Oracle(expected, lambda n: n % 3 == 0)):
        sampler = NativeSampler(decoder, speculate=3, guesser=guesser)
        rollouts = play(sampler, prompts, naming, KEY)
        assert bits(rollouts) == bits(expected)
        assert guessed(sampler)[0] > 10
        assert all(np.array_equal(a.experts, b.experts) for a, b in zip(rollouts, expected, strict=True))


def test_the_noise_of_an_ablation_counts_drawn_tokens(decoder):
    requests = [
        Request(r.ids, r.rng_key, r.draw_params._replace(logit_noise=0.5), r.max_tokens)
        for r in params().requests([[9, 8], [7]], KEY)
    ]
    expected = draw(NativeSampler(decoder), requests)
    sampler = NativeSampler(decoder, speculate=3, guesser=Oracle(expected, lambda n: n % 4 == 0))
    assert bits(draw(sampler, requests)) == bits(expected)
    assert 0 < guessed(sampler)[1] < guessed(sampler)[0]


def test_guesses_become_fewer_where_they_are_wrong_and_come_back(decoder, monkeypatch):
    """Without a guess that is worth it, one turn of a sample in 16 has one."""
    monkeypatch.setattr(speculation._Chance, "worth", WORTH)
    prompts, long = [[9, 8, 7], [5] * 7], params(stop=frozenset(), max_tokens=101, num_generations=4)
    expected = complete(NativeSampler(decoder), prompts, long, KEY)
    oracle = Oracle(expected, lambda n: True)
    sampler = NativeSampler(decoder, speculate=4, guesser=oracle)
    assert bits(complete(sampler, prompts, long, KEY)) == bits(expected)
    assert 8 * 100 // 16 <= guessed(sampler)[0] < 8 * 100 // 5
    oracle._wrong = lambda n: False
    for _ in range(2):
        before = guessed(sampler)
        assert bits(complete(sampler, prompts, long, KEY)) == bits(expected)
    guesses, drawn = np.subtract(guessed(sampler), before)
    assert guesses == drawn > 8 * 100 / 2


# --- planted faults --------------------------------------------------------------------------------------


def _unequal(decoder: Decoder, guesser: Callable[[Sequence[Rollout]], Guesser], k: int = 3) -> int:
    """Trajectories that differ from those without guesses, of 8."""
    prompts, few = [[9, 8, 7], [5] * 7], params(stop=frozenset(), max_tokens=9, num_generations=4)
    expected = complete(NativeSampler(decoder), prompts, few, KEY)
    rollouts = complete(NativeSampler(decoder, speculate=k, guesser=guesser(expected)), prompts, few, KEY)
    return sum(a != b for a, b in zip(bits(rollouts), bits(expected), strict=True))


def _half_right(expected: Sequence[Rollout]) -> Guesser:
    return Oracle(expected, lambda n: n % 2 == 0)


def test_no_fault_is_seen_where_none_is_planted(decoder):
    assert _unequal(decoder, _half_right) == 0
    assert _unequal(decoder, lambda expected: Oracle(expected, lambda n: n == 12), k=2) == 0


def test_control_accepting_every_guess_is_seen(decoder, monkeypatch):
    monkeypatch.setattr(SampleGuesses, "stand", lambda guesses, guess, drawn: len(drawn))
    assert _unequal(decoder, _half_right) == 8


def test_control_accepting_by_probability_is_seen(decoder, monkeypatch):
    """Each guess with the chance that the model gives it, as speculative decoding does elsewhere."""
    numbers = np.random.default_rng(0)

    def stand(guesses: SampleGuesses, guess: Sequence[int], drawn: Sequence[decode.DrawnToken]) -> int:
        hits = 0
        while hits < len(guess) and numbers.random() < np.exp(drawn[hits].logprob):
            hits += 1
        return hits + 1

    monkeypatch.setattr(SampleGuesses, "stand", stand)
    assert _unequal(decoder, _half_right) > 0


def test_control_a_number_of_the_key_for_each_forward_is_seen(decoder, monkeypatch):
    rows = Sample.rows
    monkeypatch.setattr(
        Sample, "rows", lambda sample, guess: [r._replace(drawn=sample.drawn) for r in rows(sample, guess)]
    )
    assert _unequal(decoder, _half_right) == 8


def test_control_keys_of_a_refused_guess_that_still_count_are_seen(decoder, monkeypatch):
    refused, stand, row = Counter(), SampleGuesses.stand, Sample.row.fget

    def counted(guesses: SampleGuesses, guess: Sequence[int], drawn: Sequence[decode.DrawnToken]) -> int:
        n = stand(guesses, guess, drawn)
        refused[guesses._request.rng_key] += len(drawn) - n
        return n

    def shifted(sample: Sample) -> decode.Row:
        r = row(sample)
        return r._replace(position=r.position + refused[r.rng_key])

    monkeypatch.setattr(SampleGuesses, "stand", counted)
    monkeypatch.setattr(Sample, "row", property(shifted))
    monkeypatch.setattr(BlockCache, "clear", lambda cache, slots: None)
    assert _unequal(decoder, lambda expected: Oracle(expected, lambda n: n == 12), k=2) > 0


def test_control_rows_that_depend_on_their_number_are_seen(decoder, monkeypatch):
    logits = decode.head_logits

    def by_rows(x: torch.Tensor, *rest) -> torch.Tensor:
        return logits(x, *rest) * (1 + 1e-3 * (len(x) % 3))

    monkeypatch.setattr(decode, "head_logits", by_rows)
    assert _unequal(decoder, _half_right) > 0


def test_control_kept_blocks_that_end_after_a_refused_guess_are_seen(decoder, monkeypatch):
    """The last token of a turn has no keys of its own; a refused guess may have written in its place."""
    few = params(stop=frozenset(), max_tokens=KEY_TILE - 2, num_generations=1)
    expected = bits(in_three_turns(NativeSampler(decoder), [[9, 8]], few, KEY))
    written = property(lambda sample: (*sample.prefix.ids, *sample.tokens))
    monkeypatch.setattr(Sample, "written", written)
    sampler = NativeSampler(decoder, speculate=2, guesser=Guesser(lambda request, tokens, k: [1] * k))
    assert bits(in_three_turns(sampler, [[9, 8]], few, KEY)) != expected


# --- guesses that the model overflows with -----------------------------------------------------------------


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def poisoned(request, model, monkeypatch) -> Decoder:
    """Token 1 has no finite keys and values. It is never drawn.

    Attention multiplies whole tiles, as on a GPU. The loops of cpp/ leave out the keys after a row.
    """
    monkeypatch.setattr(backend, "library", lambda: None)
    raw = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False}
    layout = Layout(ModelConfig.from_dict(raw))
    flat = randn(0, layout.numel, scale=0.1)
    layout.views(flat)["embed"][1] = float("inf")
    return Decoder(layout.config, flat.to(request.param), layout)


def _poison(request: Request, tokens: Sequence[int], k: int) -> Sequence[int]:
    return [1] * k if len(tokens) % 2 else []


NEVER_1 = SamplingParams.of(1.0, 0, 1.0, 0.0, {}, range(2, VOCAB))


def test_a_guess_that_is_not_finite_changes_no_bit(poisoned):
    few = params(NEVER_1, stop=frozenset())
    expected = complete(NativeSampler(poisoned), [[9, 8], [5] * 30], few, KEY)
    sampler = NativeSampler(poisoned, speculate=3, guesser=Guesser(_poison))
    assert bits(complete(sampler, [[9, 8], [5] * 30], few, KEY)) == bits(expected)
    assert guessed(sampler)[0] > 10


@pytest.mark.parametrize("fault", ["no second draw", "nothing is cleared"])
def test_control_a_guess_that_is_not_finite_ends_the_run(poisoned, monkeypatch, fault):
    if fault == "no second draw":
        trusting = SimpleNamespace(isfinite=lambda x: True)
        monkeypatch.setattr(speculation, "math", trusting)
    else:
        monkeypatch.setattr(BlockCache, "clear", lambda cache, slots: None)
    sampler = NativeSampler(poisoned, speculate=3, guesser=Guesser(_poison))
    with pytest.raises(FloatingPointError, match="are not finite"):
        complete(sampler, [[9, 8], [5] * 30], params(NEVER_1, stop=frozenset()), KEY)
