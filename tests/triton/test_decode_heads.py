"""qk_norm, rope and the cache's write by one launch have the bits of three operations (both interpreted)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import decode_heads_triton
from zerokl.kernels.attention_plan import KEY_TILE
from zerokl.kernels.decode_heads import CacheSlots, QKNormWeights, heads_to_cache, heads_to_cache_ref
from zerokl.kernels.launch import recorded_launches

from tests.helpers import DTYPES, property_settings, randn, total_unequal

BLOCKS = 5


def both(
    dtype: torch.dtype, cache: torch.dtype, n: int, heads: int, kv_heads: int, D: int, has_norm: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries and the cache, by one launch and by the three operations."""
    qkv = randn(n, n, heads + 2 * kv_heads, D, dtype=dtype, scale=3.0)
    wq, wk = randn(1, D, dtype=dtype), randn(2, D, dtype=dtype)
    cos, sin = randn(3, n, D // 2).to(dtype).float(), randn(4, n, D // 2).to(dtype).float()
    norm = QKNormWeights(wq, wk, 1e-6) if has_norm else None
    places = torch.randperm(BLOCKS * KEY_TILE, generator=torch.Generator().manual_seed(n))[:n]
    results = []
    for op in (heads_to_cache, heads_to_cache_ref):
        pages = torch.full((BLOCKS * kv_heads, 2, KEY_TILE, D), -7.0, dtype=cache)
        slots = CacheSlots(pages, places // KEY_TILE, places % KEY_TILE)
        with torch.no_grad(), recorded_launches(and_run=True) as launches:
            q = op(qkv, norm, cos, sin, heads, slots)
        results.append([q, pages])
    assert len(launches) == 1 + has_norm
    return tuple(results)


@property_settings(25)
@given(
    dtypes=st.sampled_from([(d, d) for d in DTYPES] + [(torch.float32, d) for d in DTYPES]),
    n=st.integers(1, 9),
    kv_heads=st.integers(1, 5),
    group=st.integers(1, 4),
    D=st.sampled_from([2, 32, 64, 100, 128]),
    has_norm=st.booleans(),
)
def test_one_launch_has_the_bits_of_three(dtypes, n, kv_heads, group, D, has_norm):
    fused, apart = both(*dtypes, n, kv_heads * group, kv_heads, D, has_norm)
    assert total_unequal(fused, apart) == 0
    # Only the places of the tokens were written.
    assert (fused[1] != -7.0).any(dim=-1).sum() <= 2 * n * kv_heads


@pytest.mark.parametrize("D", [128, 256])
def test_a_head_that_is_too_wide_takes_the_three_operations(D):
    qkv, cos = randn(0, 2, 4, D), randn(1, 2, D // 2)
    slots = CacheSlots(torch.zeros(2, 2, KEY_TILE, D), *torch.zeros(2, 2, dtype=torch.int64))
    with recorded_launches() as launches, torch.no_grad():
        heads_to_cache(qkv, None, cos, cos, 2, slots)
    expected = "_heads_to_cache" if D == 128 else "_rope"
    assert [launch.kernel.__name__ for launch in launches] == [expected]


def test_control_a_rounding_that_is_left_out_has_other_bits(monkeypatch):
    """In fp32 there is no rounding between qk_norm and rope: the 16-bit numbers differ."""
    dtype, D = torch.bfloat16, 64
    fused, apart = both(dtype, dtype, 6, 4, 2, D, True)
    assert total_unequal(fused, apart) == 0
    qkv = randn(6, 6, 8, D, dtype=dtype, scale=3.0).float()
    cos, sin = (randn(i, 6, D // 2).to(dtype).float() for i in (3, 4))
    wq, wk = (randn(i, D, dtype=dtype).float() for i in (1, 2))
    slots = CacheSlots(torch.zeros(2 * 2, 2, KEY_TILE, D), *torch.zeros(2, 6, dtype=torch.int64))
    with torch.no_grad():
        q = heads_to_cache(qkv, QKNormWeights(wq, wk, 1e-6), cos, sin, 4, slots).to(dtype)
    assert total_unequal([q], [apart[0]]) > 0


def test_control_keys_at_another_place_are_found(monkeypatch):
    launch = decode_heads_triton.launch

    def moved(kernel, grid, *args, **options):
        launch(kernel, grid, *args[:8], 1 - args[8] % 2, *args[9:], **options)

    monkeypatch.setattr(decode_heads_triton, "launch", moved)
    fused, apart = both(torch.float32, torch.float32, 4, 4, 2, 32, True)
    assert total_unequal([fused[0]], [apart[0]]) == 0
    assert total_unequal([fused[1]], [apart[1]]) > 0


def test_heads_that_do_not_fit_are_refused():
    slots = CacheSlots(torch.zeros(2, 2, KEY_TILE, 8), *torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"heads_to_cache: qkv \(1, 5, 8\) must be \[n, heads \(2\)"):
        heads_to_cache(randn(0, 1, 5, 8), None, randn(0, 1, 4), randn(0, 1, 4), 2, slots)
