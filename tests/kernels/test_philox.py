"""Philox against Random123's known answers; numbers depend on seed, stream and counter only."""

import numpy as np
import pytest
from zerokl.kernels.philox import Stream, permutation, philox, uniform, uniform_range

# Random123's kat_vectors for philox4x32-10: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers_of_random123(counter, key, result):
    assert philox(np.array([_words(counter)], np.uint64), tuple(_words(key))).tolist() == [_words(result)]


def test_each_row_is_independent_of_the_others():
    counters = np.random.default_rng(0).integers(0, 1 << 32, (100, 4), np.uint64)
    together = philox(counters, (3, 4))
    assert all((philox(counters[i : i + 1], (3, 4)) == together[i]).all() for i in range(100))


def test_uniform_is_made_of_53_bits_of_the_first_two_words():
    counter = np.array([[1, 2, 3, 4]], np.uint64)
    a, b, *_ = (int(x) for x in philox(counter, (9, int(Stream.EVALUATE)))[0])
    assert uniform(counter, 9, Stream.EVALUATE)[0] == ((a >> 5) * 2**26 + (b >> 6)) / 2**53


def test_uniform_numbers_are_uniform():
    u = uniform_range(100_000, 1, Stream.SAMPLE)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    cells = np.histogram(u, 100, (0, 1))[0]
    chi_square = ((cells - 1000) ** 2 / 1000).sum()
    # Five standard deviations of chi-square with 99 degrees of freedom.
    assert abs(chi_square - 99) < 5 * (2 * 99) ** 0.5


@pytest.mark.parametrize("change", [{"seed": 2}, {"stream": Stream.ORDER}, {"word": 1}, {"word": 1 << 40}])
def test_every_part_of_the_key_changes_the_numbers(change):
    base = {"n": 100, "seed": 1, "stream": Stream.SAMPLE, "word": 0}
    assert not np.isin(uniform_range(**base | change), uniform_range(**base)).any()


def test_permutation_holds_every_number_once():
    order = permutation(500, 3, Stream.ORDER)
    assert sorted(order.tolist()) == list(range(500))
    assert order.tolist() != permutation(500, 4, Stream.ORDER).tolist()


@pytest.mark.parametrize("seed", [-1, 1 << 32])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=rf"seed \({seed}\) must lie in"):
        uniform_range(1, seed, Stream.SAMPLE)
