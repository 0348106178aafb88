"""Requests that come while others are drawn: the bits of each drawn alone, in any order of arrival."""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.rollout import decode, generation
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import Completion, DrawParams, Request, RngKey, serve_in_waves
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.cache import BlockCache
from zerokl.model.decoder import Decoder

from tests.gpu.device import plant
from tests.helpers import property_settings

KINDS = [DrawParams(SamplingParams(), frozenset()), DrawParams(SamplingParams(0.5), frozenset(range(6)))]
TOTAL = 8 * KEY_TILE  # tokens of a trajectory at most


class Turn(NamedTuple):
    between: tuple[int, ...]  # ids that stand before it
    max_tokens: int
    wait: int  # how often the sampler asks in vain before the turn can be drawn


@dataclass
class Script:
    """Trajectories with fixed turns. A RequestSource, which notes what happens.

    told: the most tokens that a sampler is told a trajectory may have; 0 is that no turn follows.
    """

    trajectories: list[list[Turn]]
    told: int = TOTAL
    waiting: list[list[int]] = field(default_factory=list)  # [place, how often it is asked for in vain]
    open: dict[int, Request] = field(default_factory=dict)
    drawn: list[tuple[Request, Completion]] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = [deque(turns) for turns in self.trajectories]
        self.ids: list[tuple[int, ...]] = [()] * len(self.left)
        self.counts = [0] * len(self.left)
        for place in range(len(self.left)):
            self._next(place)

    def _next(self, place: int) -> None:
        if self.left[place]:
            self.waiting.append([place, self.left[place][0].wait])

    def ready(self, at_least: float) -> list[tuple[int, Request]]:
        ready: list[int] = []
        while True:
            ready += [place for place, wait in self.waiting if wait <= 0]
            self.waiting = [[place, wait - 1] for place, wait in self.waiting if wait > 0]
            if len(ready) >= at_least or not self.waiting:
                return [(place, self._request(place)) for place in ready]

    def _request(self, place: int) -> Request:
        turn, key = self.left[place].popleft(), RngKey(1, 2, prompt=place % 3, sample=place // 3)
        ids = (*self.ids[place], *turn.between)
        draw_params = KINDS[(place + len(self.left[place])) % 7 == 6]
        request = Request(ids, key, draw_params, turn.max_tokens, self.counts[place], self.told)
        self.open[place] = request
        self.events.append(("given", place))
        return request

    def completed(self, place: int, completion: Completion) -> None:
        request = self.open.pop(place)
        self.events.append(("completed", place))
        self.drawn.append((request, completion))
        self.ids[place] = (*request.ids, *completion.ids)
        self.counts[place] += len(completion.ids)
        self._next(place)

    def unequal(self, decoder: Decoder) -> int:
        """How many completions are not those of a sampler that draws each request alone."""
        assert not self.open
        assert not any(self.left)
        count = 0
        for request, completion in self.drawn:
            (alone,) = NativeSampler(decoder).generate([replace(request, trajectory_tokens=0)])
            count += bits(alone) != bits(completion)
        return count


def bits(completion: Completion) -> tuple[tuple[int, ...], bytes, str]:
    return completion.ids, completion.logprobs.tobytes(), completion.finish


TURN = st.builds(
    Turn,
    st.lists(st.integers(6, 9), min_size=1, max_size=20).map(tuple),
    st.integers(1, 12),
    st.integers(0, 9),
)


@property_settings(25)
@given(
    trajectories=st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=1, max_size=7),
    concurrency=st.integers(1, 6),
    batch_tokens=st.integers(1, 60),
    blocks=st.integers(TOTAL // KEY_TILE + 1, 40),
    told=st.sampled_from([0, 20, TOTAL]),
)
def test_turns_that_come_at_any_time_have_the_bits_of_each_alone(
    decoder, trajectories, concurrency, batch_tokens, blocks, told
):
    sampler = NativeSampler(
        decoder,
        concurrency,
        batch_tokens,
        cache_bytes=blocks * BlockCache.bytes_per_block(decoder.config, decoder.cache_dtype),
    )
    script = Script(trajectories, told)
    sampler.serve(script)
    assert len(script.drawn) == sum(map(len, trajectories))
    assert script.unequal(decoder) == 0
    memory = sampler._memory
    sampler.end_turns()
    assert memory is None or memory.cache.free == memory.cache.blocks


SHORT, LONG = [Turn((7, 8), 2, 3)] * 4, [Turn((7, 9), 60, 0)]


def test_a_turn_begins_while_another_trajectory_draws_its_first(decoder):
    script = Script([LONG, SHORT])
    NativeSampler(decoder).serve(script)
    long_ends = script.events.index(("completed", 0))
    assert script.events[:long_ends].count(("completed", 1)) == 4
    waves = Script([LONG, SHORT])
    serve_in_waves(NativeSampler(decoder), waves)
    long_ends = waves.events.index(("completed", 0))
    assert waves.events[:long_ends].count(("given", 1)) == 1, "control"
    assert {bits(c) for _, c in waves.drawn} == {bits(c) for _, c in script.drawn}


def test_a_request_that_needs_a_larger_memory_gets_one(decoder):
    """Nobody has told that the trajectory grows, so the first memory has room for its first turn only."""
    grows = [Turn((7,) * 3, 2, 0), Turn((8,) * 60, 20, 0), Turn((9,) * 3, 2, 0)]
    script = Script([grows, SHORT], told=4)
    NativeSampler(decoder, 1).serve(script)
    assert script.unequal(decoder) == 0
    assert len(script.drawn) == 7


def _counts_anew(plain, sample):
    return plain(sample)._replace(drawn=len(sample.tokens))


def _takes_every_kind(plain, self, *args):
    plain(self, *args)
    self.fits = lambda request: True


def _in_the_first_ones_place(plain, self, rows):
    plain(self, [row._replace(pages=rows[0].pages) for row in rows])


FAULTS = {
    "a turn that counts its random numbers anew": (generation.Sample, "row", _counts_anew),
    "a request of another kind beside the others": (generation.Generation, "__init__", _takes_every_kind),
    "a row that joins without its place in the cache": (decode.DecodeRows, "load", _in_the_first_ones_place),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_fault_is_seen(decoder, monkeypatch, fault):
    script = Script([SHORT, SHORT, LONG, SHORT, SHORT])
    plant(monkeypatch, *FAULTS[fault])
    NativeSampler(decoder).serve(script)
    monkeypatch.undo()
    assert script.unequal(decoder) > 0
