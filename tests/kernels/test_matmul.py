"""matmul is defined as products of ROW_TILE rows; longer tiles are taken only where every bit agrees."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from zerokl.files.bitwise import count_unequal
from zerokl.kernels import matmul as matmul_module
from zerokl.kernels.linear import linear
from zerokl.kernels.matmul import matmul, pack_weights
from zerokl.kernels.order import ROW_TILE

from tests.helpers import forgotten, property_settings, randn, threads

MULTIPLES_OF_ALIGN = st.integers(1, 40).map(lambda n: 16 * n)


def by_definition(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if x.dtype in matmul_module.THROUGH_FP32:
        return by_definition(x.float(), w.float()).to(x.dtype)
    padded = F.pad(x, (0, 0, 0, -len(x) % ROW_TILE))
    by_onednn = x.dtype == torch.float32 and matmul_module._ONEDNN
    tiles = padded.split(ROW_TILE)
    products = [matmul_module._linear(tile, w.t()) if by_onednn else torch.mm(tile, w) for tile in tiles]
    return torch.cat(products)[: len(x)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@property_settings(15)
@given(
    T=st.one_of(st.integers(1, 2200), st.sampled_from([32, 64, 128, 256, 512, 1024])),
    K=MULTIPLES_OF_ALIGN,
    N=MULTIPLES_OF_ALIGN,
    transposed=st.booleans(),
    n=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_equals_its_definition(dtype, T, K, N, transposed, n, seed):
    w = randn(seed, N, K, dtype=dtype).t() if transposed else randn(seed, K, N, dtype=dtype)
    x = randn(seed + 1, T, K, dtype=dtype)
    with threads(n):
        assert count_unequal(matmul(x, w.t()), by_definition(x, w)) == 0


def test_bf16_where_the_library_has_none(monkeypatch):
    monkeypatch.setattr(matmul_module, "THROUGH_FP32", (torch.float16, torch.bfloat16))
    x, w = (randn(i, 100, 64, dtype=torch.bfloat16) for i in (0, 1))
    whole = matmul(x, w)
    assert count_unequal(whole, matmul(x.float(), w.float()).bfloat16()) == 0
    assert not pack_weights([w])
    assert count_unequal(torch.cat([matmul(part, w) for part in x.split(7)]), whole) == 0


@pytest.mark.parametrize(("dtype", "one"), [(torch.bfloat16, 257.0), (torch.float16, 2049.0)])
def test_a_bias_is_added_before_the_one_rounding(dtype, one):
    # `one` lies halfway between two numbers of the dtype, and rounds down. With the bias it is the upper one.
    x = torch.ones(3, 16, dtype=dtype)
    w = torch.zeros(16, 16, dtype=dtype)
    w[:, 0], w[:, 1] = one - 1, 1.0
    y = linear(x, w, torch.ones(16, dtype=dtype))
    assert (y == one + 1).all()
    assert (matmul(x, w) + torch.ones(16, dtype=dtype) == one - 1).all(), "control: two roundings"


@pytest.fixture
def another_order(monkeypatch: pytest.MonkeyPatch):
    """A matrix library that sums long products in another order: the first 48 terms alone, then the rest."""
    library = matmul_module._product

    def product(x: torch.Tensor, w: torch.Tensor, pack: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) < 256:
            return library(x, w, pack)
        return library(x[:, :48], w[:48]) + library(x[:, 48:], w[48:])

    with forgotten(matmul_module._agrees):
        monkeypatch.setattr(matmul_module, "_product", product)
        yield


@pytest.mark.usefixtures("references", "another_order")
def test_a_longer_tile_with_other_bits_is_not_taken(monkeypatch):
    x, w = randn(0, 1100, 256), randn(1, 256, 64)
    assert count_unequal(matmul(x, w.t()), by_definition(x, w)) == 0
    # control: without the probe the longer tile would be taken, and the bits would differ
    monkeypatch.setattr(matmul_module, "_agrees", lambda *_: True)
    assert count_unequal(matmul(x, w.t()), by_definition(x, w)) > 0


@pytest.mark.usefixtures("references")
def test_a_shorter_tile_with_other_bits_is_not_taken(monkeypatch):
    """A library that sums products of fewer than ROW_TILE rows in another order."""
    x, w, library = randn(0, 40, 256), randn(1, 256, 64), matmul_module._product

    def product(x: torch.Tensor, w: torch.Tensor, pack: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) >= ROW_TILE:
            return library(x, w, pack)
        return library(x[:, :48], w[:48]) + library(x[:, 48:], w[48:])

    expected = by_definition(x, w)
    with forgotten(matmul_module._agrees):
        monkeypatch.setattr(matmul_module, "_product", product)
        for T in (1, 8, 13, 31):
            assert count_unequal(matmul(x[:T], w.t()), expected[:T]) == 0
        monkeypatch.setattr(matmul_module, "_agrees", lambda *_: True)
        assert count_unequal(matmul(x[:13], w.t()), expected[:13]) > 0, "control: without the probe"


@pytest.mark.usefixtures("references")
def test_a_product_of_mm_with_other_bits_is_not_taken(monkeypatch):
    """A torch.mm that sums the first 48 terms alone."""
    x, w, mm = randn(0, 40, 96), randn(1, 96, 64), torch.mm
    expected = by_definition(x, w)
    monkeypatch.setattr(torch, "mm", lambda x, w: mm(x[:, :48], w[:48]) + mm(x[:, 48:], w[48:]))
    with forgotten(matmul_module._mm_agrees), forgotten(matmul_module._agrees):
        assert count_unequal(matmul(x, w.t()), expected) == 0
        if matmul_module._ONEDNN:
            monkeypatch.setattr(matmul_module, "_mm_agrees", lambda *_: True)
            assert count_unequal(matmul(x, w.t()), expected) > 0, "control: without the probe"


@pytest.mark.parametrize("K", [16, 64, 192])
def test_a_sum_of_zeros_has_the_sign_of_its_definition(K):
    """A gradient of 0 times negative weights: a library that begins with the first product ends at -0.0."""
    x, w = randn(0, 48, K), randn(1, K, 64)
    x[3], x[7], w[:, 5] = 0.0, -0.0, -1.0
    assert count_unequal(matmul(x, w.t()), by_definition(x, w)) == 0


@pytest.mark.usefixtures("references")
def test_a_copy_that_nothing_reads_is_not_packed(monkeypatch):
    w = randn(0, 64, 96)
    monkeypatch.setattr(matmul_module, "_mm_agrees", lambda *_: True)
    with forgotten(matmul_module._pack_helps):
        assert not pack_weights([w])


@pytest.fixture
def without_mm(monkeypatch: pytest.MonkeyPatch):
    """A library whose torch.mm has other bits than oneDNN's products, as it is with long sums."""
    monkeypatch.setattr(matmul_module, "_mm_agrees", lambda *_: not matmul_module._ONEDNN)
    with forgotten(matmul_module._pack_helps):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@property_settings(15)
@given(
    T=st.integers(1, 300),
    K=st.integers(1, 300),
    N=st.integers(1, 300),
    n=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_packed_weights_change_no_bit(dtype, T, K, N, n, seed):
    w, x = randn(seed, N, K, dtype=dtype), randn(seed + 1, T, K, dtype=dtype)
    with threads(n):
        plain = matmul(x, w)
        pack = pack_weights([w]).get(w)
        assert count_unequal(matmul(x, w, pack), plain) == 0
        assert count_unequal(matmul(x, w, pack), plain) == 0


@pytest.mark.usefixtures("without_mm")
@pytest.mark.parametrize(
    "dtype", [d for d in (torch.float32, torch.bfloat16) if d not in matmul_module.THROUGH_FP32], ids=str
)
def test_packed_weights_are_read_and_control_stale_ones_are_seen(dtype):
    w, x = randn(0, 64, 96, dtype=dtype), randn(1, 40, 96, dtype=dtype)
    pack = pack_weights([w])[w]
    before = matmul(x, w, pack)
    w += 1
    assert count_unequal(matmul(x, w, pack), before) == 0, "the packed copy is read"
    assert count_unequal(matmul(x, w), before) > 0


@pytest.mark.usefixtures("references", "without_mm")
def test_packed_weights_with_other_bits_are_not_taken(monkeypatch):
    """A library whose packed product sums in another order."""
    w, x = randn(0, 64, 96), randn(1, 40, 96)
    plain, pack = matmul(x, w), matmul_module._pack
    monkeypatch.setattr(matmul_module, "_pack", lambda w: pack(w * 1.0000001))
    with forgotten(matmul_module._pack_helps):
        assert not pack_weights([w])
    monkeypatch.setattr(matmul_module, "_pack_helps", lambda *_: True)
    taken = pack_weights([w])[w]
    assert count_unequal(matmul(x, w, taken), plain) > 0, "control: without the probe they would be taken"


@pytest.mark.usefixtures("without_mm")
def test_no_more_memory_than_allowed_is_packed(monkeypatch):
    w = [randn(i, 64, 96) for i in range(3)]
    monkeypatch.setattr(matmul_module, "_PACKED_BYTES", w[0].nbytes * 2)
    packs = pack_weights(w)
    assert [x in packs for x in w] == [True, True, False]
