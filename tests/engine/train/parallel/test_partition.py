"""How the requests of a call are cut into parts."""

from dataclasses import replace
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.rollout.types import DrawParams, Request, RngKey
from zerokl.engine.train.parallel.partition import RequestParts, in_order, virtual_shards
from zerokl.kernels.sampling_params import SamplingParams

from tests.helpers import property_settings

PARAMS = DrawParams(SamplingParams(), frozenset())


def requests_of(prompts: int, samples: int, total: int = 0) -> list[Request]:
    return [
        Request((p,), RngKey(1, 2, prompt=p, sample=g), PARAMS, 5, 0, total)
        for p in range(prompts)
        for g in range(samples)
    ]


def next_turn(requests: list[Request], ended: set[int]) -> list[Request]:
    """Each with ids of its own, as after a turn, those that ended left out."""
    longer = [replace(r, ids=(*r.ids, r.rng_key.sample, 9)) for r in requests]
    return [request for i, request in enumerate(longer) if i not in ended]


@property_settings(100)
@given(
    prompts=st.integers(0, 7),
    samples=st.integers(1, 4),
    parts=st.sampled_from([1, 2, 4]),
    ended=st.lists(st.sets(st.integers(0, 27)), max_size=3),
)
def test_every_request_has_one_part_and_no_part_has_too_many(prompts, samples, parts, ended):
    cutter, requests = RequestParts(parts), requests_of(prompts, samples, 50)
    homes: dict[RngKey, int] = {}
    for ends in [*ended, set()]:
        cut = cutter.cut(requests)
        assert in_order(cut, cut) == list(range(len(requests)))
        sizes = [len([*groupby(requests[i].ids for i in part)]) for part in cut]
        groups = len([*groupby(request.ids for request in requests)])
        assert sorted(sizes) == sorted(map(len, virtual_shards(range(groups), parts)))
        part_of = {requests[i].rng_key: part for part, members in enumerate(cut) for i in members}
        # One that moved had no room at home: those that stayed there are as many as an even cut gives it.
        for key, part in part_of.items():
            if (home := homes.get(key, part)) != part:
                stayed = {requests[i].ids for i in cut[home] if homes[requests[i].rng_key] == home}
                assert len(stayed) == sizes[home]
        homes, requests = part_of, next_turn(requests, ends)


def test_requests_of_one_turn_are_cut_into_neighbours():
    assert RequestParts(2).cut(requests_of(3, 2)) == [[0, 1], [2, 3, 4, 5]]
    assert RequestParts(4).cut(requests_of(2, 2)) == [[0, 1], [2, 3], [], []]
    assert RequestParts(2).cut([]) == [[], []]


def test_a_trajectory_comes_back_until_it_is_forgotten():
    cutter, first = RequestParts(2), requests_of(4, 2, 50)
    assert cutter.cut(first) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    backwards = next_turn(first, set())[::-1]
    assert cutter.cut(backwards) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert cutter.forget()
    assert cutter.cut(backwards) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    ends = [replace(request, trajectory_tokens=0) for request in backwards]
    assert cutter.cut(ends) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cutter.forget(), "the turns before may still be kept"
    cutter.cut(ends)
    assert not cutter.forget(), "nothing is kept for requests that do not say that turns follow"
