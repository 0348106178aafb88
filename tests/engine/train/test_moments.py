"""Moments in 8 bits: what is kept, and that a checkpoint, and where ranks cut, decide no bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.train.moments import CHUNK, CodedMoment, decode, encode
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.block_digest import BLOCK
from zerokl.model.offload import HERE

from tests.helpers import property_settings, randn

CPU = torch.device("cpu")


def kept(x: torch.Tensor, signed: bool) -> torch.Tensor:
    return decode(*encode(x, signed), signed)


def moment(n: int, seed: int, decades: float, signed: bool) -> torch.Tensor:
    """Of elements that differ by so many decades."""
    x = randn(seed, n) * 10.0 ** (decades * torch.rand(n, generator=torch.Generator().manual_seed(seed)))
    return x if signed else x.square()


@property_settings(100)
@given(
    n=st.integers(1, 3 * CHUNK),
    seed=st.integers(0, 1000),
    decades=st.sampled_from([0, 3, -3, 12, -20, -40]),
    signed=st.booleans(),
)
def test_what_is_kept_is_kept_again_by_the_same_bits(n, seed, decades, signed):
    once = kept(moment(n, seed, decades, signed), signed)
    assert count_unequal(kept(once, signed), once) == 0


@pytest.mark.parametrize("signed", [True, False])
def test_an_element_is_off_by_half_a_step_of_its_decade(signed):
    """A decade of the largest has 64 or 128 numbers, and each decade below half as many."""
    x = moment(64 * CHUNK, 3, -3.0, signed)
    scale = x.abs().view(-1, CHUNK).amax(1).repeat_interleave(CHUNK)
    share = (x.abs() / scale).clamp(min=1e-6)
    decade = (7 + torch.floor(torch.log10(share))).clamp(0, 6)
    step = 10.0 ** (decade - 6) * 0.9 / 2 ** (decade + (not signed))
    assert ((kept(x, signed) - x).abs() <= 1.02 * step * scale).all()
    assert count_unequal(kept(x, signed).abs().view(-1, CHUNK).amax(1), x.abs().view(-1, CHUNK).amax(1)) == 0
    # The control: 8 bits keep less than fp32, so most elements have other bits.
    assert count_unequal(kept(x, signed), x) > 0.9 * len(x)


def test_no_second_moment_is_rounded_to_0():
    x = moment(CHUNK, 0, -20.0, signed=False) + 1e-20
    x[0] = 1.0
    assert kept(x, False).min() > 0
    assert (kept(x, True) == 0.0).any(), "the control: numbers with a sign have a 0"


def test_parts_that_begin_at_a_chunk_have_the_bits_of_the_whole():
    assert BLOCK % CHUNK == 0, "ranks cut at the ledger's blocks"
    place, x = slice(64, 64 + 2 * CHUNK + 9), randn(0, 3 * CHUNK)
    whole = CodedMoment(3 * CHUNK, [place], HERE, CPU, True)
    whole.load(x)
    in_parts = CodedMoment(3 * CHUNK, [place], HERE, CPU, True)
    assert not in_parts.wide.any()
    for start, stop in ((64, 64 + CHUNK), (64 + CHUNK, place.stop)):
        with in_parts.brought(slice(start, stop)) as part:
            part.copy_(x[start:stop])
    assert count_unequal(in_parts.wide, whole.wide) == 0
    with pytest.raises(AssertionError, match="cuts a chunk"), in_parts.brought(slice(65, 70)):
        pass
