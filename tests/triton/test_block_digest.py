"""Digests of blocks on Triton, interpreted: the reference's, in any tiles."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import block_digest_triton
from zerokl.kernels.block_digest import block_digests, block_digests_ref

from tests.helpers import property_settings
from tests.kernels.test_block_digest import DTYPES, _bits, _spans


@property_settings(30)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    first=st.integers(0, 3),
    tile=st.sampled_from([64, 2048]),
)
def test_triton_has_the_references_digests_in_any_tiles(sizes, dtype, first, tile):
    x, ends = _bits(first + sum(sizes), dtype), first + np.cumsum(sizes)
    bounds = _spans(*((int(end) - n, int(end)) for n, end in zip(sizes, ends, strict=True)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_digest_triton, "TILE", tile)
        digests = block_digests(x, bounds)
    assert digests.equal(block_digests_ref(x, bounds))
    changed = x.clone()
    changed.view(torch.uint8)[-1] ^= 128
    assert not block_digests(changed, bounds).equal(digests)
