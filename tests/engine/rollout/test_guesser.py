"""TextGuesser: what it finds, for whom, and how much it keeps."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.rollout.guesser import TextGuesser
from zerokl.engine.rollout.types import DrawParams, Request, RngKey
from zerokl.kernels.sampling_params import SamplingParams

from tests.helpers import property_settings

DRAW = DrawParams(SamplingParams(), frozenset())
PROMPT = tuple(range(100, 110))
TEXT = [1, 2, 3, 4, 5, 6, 7]


def request(sample: int = 0, step: int = 0, ids: tuple[int, ...] = PROMPT, prompt: int = 0) -> Request:
    return Request(ids, RngKey(0, step, prompt=prompt, sample=sample), DRAW, 99)


@pytest.fixture
def guesser() -> TextGuesser:
    return TextGuesser(tokens=1000, slots=1 << 12)


def test_a_sample_goes_on_as_another_of_its_group_does(guesser):
    other, mine = request(0), request(1)
    assert list(guesser.propose(other, TEXT, 3)) == []
    assert list(guesser.propose(mine, [], 3)) == [1, 2, 3]  # after the end of the prompt
    assert list(guesser.propose(mine, [1, 2, 3], 9)) == [4, 5, 6, 7]
    assert list(guesser.propose(mine, [1, 2, 3, 9], 9)) == []
    assert list(guesser.propose(mine, [1, 2, 3, 9, 4, 5], 9)) == [6, 7]


def test_a_prompt_of_a_later_step_goes_on_as_it_did_before(guesser):
    guesser.ended(request(), TEXT)
    later = request(sample=5, step=9, prompt=3)
    assert list(guesser.propose(later, [1, 2], 2)) == [3, 4]
    assert list(guesser.propose(request(step=9, ids=(*PROMPT, 8)), [1, 2], 2)) == [], (
        "control: another prompt"
    )


def test_the_newest_text_is_continued_first_and_the_longest_end_before_it(guesser):
    guesser.ended(request(0), [1, 2, 3, 4, 50])
    guesser.ended(request(1), [9, 9, 3, 4, 60])
    assert list(guesser.propose(request(2), [7, 3, 4], 1)) == [60]
    assert list(guesser.propose(request(3), [1, 2, 3, 4], 1)) == [50]


def test_the_prompt_is_a_text(guesser):
    assert list(guesser.propose(request(), [102, 103], 3)) == [104, 105, 106]


def test_a_trajectory_that_repeats_itself_goes_on_so(guesser):
    assert list(guesser.propose(request(), [5, 6, 5, 6, 5, 6], 5)) == [5, 6, 5, 6, 5]


def test_a_later_turn_goes_on_with_the_text_of_its_trajectory(guesser):
    first = replace(request(), trajectory_tokens=99)
    guesser.ended(first, TEXT)
    second = replace(first, ids=(*PROMPT, *TEXT, 70, 71, 72), drawn=len(TEXT))
    assert list(guesser.propose(second, [3, 4], 2)) == [5, 6]
    guesser.propose(second, [3, 4, 80, 81], 2)
    assert list(guesser.propose(request(1), [70, 71, 72], 9)) == [3, 4, 80, 81]


def test_a_request_that_is_drawn_again_is_known(guesser):
    for _ in range(2):
        guesser.ended(request(), TEXT)
    assert list(guesser.propose(request(), [], 9)) == TEXT


@property_settings(40)
@given(
    texts=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.lists(st.integers(0, 4), max_size=60)), max_size=30
    ),
    turns=st.booleans(),
)
def test_its_memory_has_a_bound(texts, turns):
    """Also where trajectories never end, and where a text is longer than all that is kept."""
    guesser = TextGuesser(tokens=50, slots=64)
    for sample, prompt, tokens in texts:
        r = replace(request(sample, prompt=prompt, ids=PROMPT[prompt:]), trajectory_tokens=99 * turns)
        for n in range(len(tokens)):
            assert all(0 <= token < 110 for token in guesser.propose(r, tokens[:n], 3))
        if sample:
            guesser.ended(r, tokens)
        kept = guesser._texts
        assert guesser._held == sum(len(text.ids) for text in kept.values()) <= 50
        assert len(kept) <= 51
        assert all(
            text.number in kept for held in (guesser._open, guesser._prompts) for text in held.values()
        )
