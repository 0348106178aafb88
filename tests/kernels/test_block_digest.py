"""Digests of blocks: every changed bit and every other order is found, on each device alike."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels.block_digest import BLOCK, LANES, block_digests, block_digests_ref, keys
from zerokl.kernels.philox import Stream, philox

from tests.helpers import property_settings, randn

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32]


def _bits(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """n elements of random bits: NaNs, infinities and negative zeros too."""
    words = np.random.default_rng(seed).integers(0, 256, n * dtype.itemsize, np.uint8)
    return torch.from_numpy(words).view(dtype)


def _spans(*bounds: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int64).view(-1, 2)


def _digest(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(block_digests(x, _spans((0, len(x))))[0].tolist())


def test_the_digest_is_the_sum_of_words_times_keys():
    for x in (_bits(5, torch.float32), _bits(7, torch.float16)):
        words = [int(w) for w in x.view(torch.uint8).numpy().view(f"<u{x.element_size()}")]
        sums = [sum(int(k) * w for k, w in zip(lane, words, strict=False)) % 2**64 for lane in keys()]
        assert [d % 2**64 for d in _digest(x)] == sums


def test_keys_are_philox_words():
    assert keys().shape == (LANES, BLOCK)
    words = [int(w) for w in philox(np.array([[7, 0, 0, 0]], np.uint64), (0, int(Stream.DIGEST)))[0]]
    assert keys()[:, 7].tolist() == [words[0] << 32 | words[1], words[2] << 32 | words[3]]


@property_settings(60)
@given(n=st.integers(1, 3000), dtype=st.sampled_from(DTYPES), data=st.data())
def test_a_flipped_bit_is_found(n, dtype, data):
    x = _bits(n, dtype, n)
    byte, bit = data.draw(st.integers(0, n * dtype.itemsize - 1)), data.draw(st.integers(0, 7))
    changed = x.clone()
    changed.view(torch.uint8)[byte] ^= 1 << bit
    assert all(a != b for a, b in zip(_digest(x), _digest(changed), strict=True))


@property_settings(60)
@given(n=st.integers(2, 3000), dtype=st.sampled_from(DTYPES), data=st.data())
def test_swapped_elements_and_moved_ones_are_found(n, dtype, data):
    x = _bits(n, dtype, n)
    i, j = data.draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))
    swapped = x.clone()
    swapped[i], swapped[j] = x[j], x[i]
    words = x.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    assert (_digest(swapped) == _digest(x)) == bool(words[i] == words[j])
    moved = x.roll(1)
    assert (_digest(moved) == _digest(x)) == bool((words.roll(1) == words).all())


def test_control_a_sum_without_positions_misses_a_swap(monkeypatch):
    x, swapped = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    assert _digest(x) != _digest(swapped)
    one_key = np.broadcast_to(keys()[:, :1], (LANES, BLOCK))
    monkeypatch.setattr("zerokl.kernels.block_digest.keys", lambda: one_key)
    assert block_digests_ref(x, _spans((0, 2))).equal(block_digests_ref(swapped, _spans((0, 2))))


def test_a_negative_zero_and_the_payload_of_a_nan_are_bits():
    nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    values = [torch.zeros(1), -torch.zeros(1), torch.tensor([torch.nan]), nan]
    assert len({_digest(x) for x in values}) == 4


@property_settings(20)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.sampled_from(DTYPES))
def test_blocks_do_not_depend_on_each_other(sizes, dtype):
    x, ends = _bits(sum(sizes), dtype), np.cumsum(sizes)
    bounds = [(int(end) - n, int(end)) for n, end in zip(sizes, ends, strict=True)]
    together = block_digests(x, _spans(*bounds))
    backwards = block_digests(x, _spans(*bounds[::-1])).flip(0)
    alone = torch.stack([torch.tensor(_digest(x[a:b])) for a, b in bounds])
    assert together.equal(alone)
    assert together.equal(backwards)


def test_a_block_may_be_as_long_as_there_are_keys():
    x = randn(0, BLOCK + 1)
    assert _digest(x[:BLOCK]) != _digest(x[1:])


@pytest.mark.parametrize("x", [torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)[::2]])
def test_other_shapes_are_refused(x):
    with pytest.raises(ValueError, match="must be one contiguous line of elements of 2 or 4 bytes"):
        block_digests(x, _spans((0, 1)))
