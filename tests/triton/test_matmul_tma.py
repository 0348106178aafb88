"""Products through TMA, interpreted, have the bits of the other kernel, whatever the rows and the runs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import matmul_tma_triton, matmul_triton, tiles
from zerokl.kernels.order import blocks_of_rows, token_blocks
from zerokl.kernels.tile_tables import DEFAULT_TABLE, TABLES

from tests.helpers import property_settings, randn, total_unequal

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture
def products(monkeypatch):
    """matmul and add_outer by both kernels: (through TMA, the other one)."""

    def both(call):
        results = []
        for min_tiles, outer in ((1, tiles.tma_outer_tiles), (1 << 40, lambda *_: None)):
            with monkeypatch.context() as patch:
                patch.setattr(tiles, "_TMA_MIN_TILES", min_tiles)
                patch.setattr(matmul_triton, "tma_outer_tiles", outer)
                results.append(call())
        return results

    return both


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The kernels of matmul_tma_triton that were launched."""
    names, launch = [], matmul_tma_triton.launch

    def record(kernel, *args, **options):
        names.append(kernel.fn.__name__)
        launch(kernel, *args, **options)

    monkeypatch.setattr(matmul_tma_triton, "launch", record)
    return names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "N", "K"), [(130, 264, 144), (65, 520, 72), (257, 48, 200)])
def test_forward_and_input_gradient_have_the_bits_of_the_other_kernel(products, launched, M, N, K, dtype):
    x, w, b = randn(1, M, K, dtype=dtype), randn(2, N, K, dtype=dtype), randn(3, N, dtype=dtype)
    dy = randn(4, M, N, dtype=dtype)
    for call in (
        lambda: matmul_triton.matmul(x, w),
        lambda: matmul_triton.matmul(x, w, b),
        lambda: matmul_triton.matmul(dy, w.t()),
    ):
        tma, other = products(call)
        assert total_unequal([tma], [other]) == 0
    assert launched == ["_matmul_tma"] * 3


def test_rows_that_tma_cannot_read_go_through_the_other_kernel(products, launched):
    x, w = randn(1, 130, 141, dtype=DTYPES[0])[:, :140], randn(2, 264, 140, dtype=DTYPES[0])
    tma, other = products(lambda: matmul_triton.matmul(x, w))
    assert total_unequal([tma], [other]) == 0
    assert not launched


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    N=st.sampled_from([8, 136, 264]),
    K=st.sampled_from([16, 72, 264]),
    seed=st.integers(0, 1000),
    empty=st.booleans(),
)
@property_settings(15)
def test_weight_gradients_have_the_bits_of_the_other_kernel(lengths, N, K, seed, empty):
    dtype, T = DTYPES[seed % 2], sum(lengths)
    dy, x = randn(seed, T, N, dtype=dtype), randn(seed + 1, T, K, dtype=dtype)
    # Several shards: all sequences but the last are of shard 0, and nothing is of shard 1.
    blocks = token_blocks(lengths, [0] * (len(lengths) - 1) + [2])
    other = torch.zeros(3, N, K) if empty else randn(seed + 2, 3, N, K)
    tma = torch.full((3, N, K), float("nan")) if empty else other.clone()
    for shard in {0, 1, 2}.difference(blocks.shards):
        tma[shard] = other[shard]
    chosen = tiles.tma_outer_tiles(N, K, dtype, "hopper")
    matmul_tma_triton.add_outer_tma(tma, dy, x, blocks.on(x.device).runs, chosen, 4, empty)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul_triton, "tma_outer_tiles", lambda *_: None)
        matmul_triton.add_outer(other, dy, x, blocks)
    assert total_unequal([tma], [other]) == 0


def test_control_other_runs_give_other_bits():
    dy, x = randn(1, 300, 136, dtype=DTYPES[0]), randn(2, 300, 72, dtype=DTYPES[0])
    results = []
    for blocks in ([(0, 300)], [(0, 37), (37, 300)]):
        acc, runs = torch.zeros(1, 136, 72), blocks_of_rows(blocks).on(x.device).runs
        chosen = tiles.tma_outer_tiles(136, 72, x.dtype, "hopper")
        matmul_tma_triton.add_outer_tma(acc, dy, x, runs, chosen, 4, False)
        results.append(acc)
    assert total_unequal(results[:1], results[1:]) > 0


def test_a_token_of_a_neighbour_is_not_read():
    dy, x = randn(1, 300, 136, dtype=DTYPES[0]), randn(2, 300, 72, dtype=DTYPES[0])
    acc, alone = torch.zeros(1, 136, 72), torch.zeros(1, 136, 72)
    matmul_triton.add_outer(alone, dy[100:137], x[100:137], blocks_of_rows([(0, 37)]))
    for tensor in (dy, x):
        tensor[:100], tensor[137:] = float("nan"), float("nan")
    matmul_triton.add_outer(acc, dy, x, blocks_of_rows([(100, 137)]))
    assert total_unequal([acc], [alone]) == 0


@pytest.mark.parametrize("gpu", ["ampere", "ada", "blackwell", "sm120", "amd"])
def test_only_hopper_takes_tma(gpu):
    for dtype in (*DTYPES, torch.float32):
        assert tiles.tma_matmul_tiles(4096, 4096, 1024, dtype, gpu, DEFAULT_TABLE) is None
        assert tiles.tma_outer_tiles(4096, 1024, dtype, gpu) is None
    assert tiles.tma_matmul_tiles(4096, 4096, 1024, torch.float32, "hopper", DEFAULT_TABLE) is None


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_tile_along_k_is_the_tables(table):
    for N, K in ((4096, 1024), (2048, 2048), (151936, 2048), (4096, 4096)):
        for M in (1, 64, 4096):
            shape = M, N, K, torch.bfloat16, "hopper", table
            expected = tiles.block_k(*shape[1:])
            chosen = [tiles.matmul_tiles(*shape), tiles.tma_matmul_tiles(*shape)]
            chosen = [t for t in chosen if t is not None]
            assert {t.block_k for t in chosen} == {expected}
