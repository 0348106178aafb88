"""Matrix products on Triton, interpreted: the bits of vLLM's kernel, the law, and accuracy against fp64."""

import pytest
import torch
from zerokl.engine.rollout.vllm.installed import require_vllm
from zerokl.kernels import matmul, matmul_triton, tiles
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.launch import recorded_launches
from zerokl.kernels.linear import linear
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass
from zerokl.kernels.tile_tables import tile_table

from tests.helpers import assert_at_most_twice_the_error, randn, total_unequal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Wide enough that the reduced dimension has several tiles and an uneven rest.
K, N = 1040, 144


def _inputs(M: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return randn(1, M, K, dtype=dtype), randn(2, N, K, dtype=dtype, scale=K**-0.5), randn(3, N, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [1, 7, 65, 130])
def test_bits_of_vllms_kernel(batch_invariant, M, dtype):
    x, w, b = _inputs(M, dtype)
    for bias in (None, b):
        assert total_unequal([linear(x, w, bias)], [batch_invariant.matmul_persistent(x, w.t(), bias)]) == 0


def test_control_another_tile_along_k_gives_other_bits(batch_invariant, monkeypatch):
    x, w, _ = _inputs(65, torch.float32)
    monkeypatch.setattr(tiles, "_32_BIT", 64)
    assert total_unequal([matmul_triton.matmul(x, w)], [batch_invariant.matmul_persistent(x, w.t())]) > 0


@pytest.mark.parametrize("family", ["ada", "hopper", "blackwell", "sm120"])
def test_tiles_along_k_are_vllms(batch_invariant, family):
    from vllm.model_executor.determinism import batch_invariant_configs

    table = tile_table(require_vllm())
    tuned = batch_invariant_configs._BATCH_INVARIANT_MATMUL_TUNED_CONFIGS[family]
    ours = {shape: tiles.block_k(*shape, torch.bfloat16, family, table) for shape in tuned}
    assert ours == {shape: config.block_k for shape, config in tuned.items()}
    listed = [shape for shapes in table.tuned[family].values() for shape in shapes]
    assert set(listed) <= set(tuned)
    for dtype, default in ((torch.bfloat16, 64), (torch.float16, 64), (torch.float32, 32)):
        assert tiles.block_k(1000, 1000, dtype, family, table) == default


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype):
    x, w, b = _inputs(130, dtype)
    together = linear(x, w, b)
    dy = randn(4, 130, N, dtype=dtype)
    dx = matmul.matmul(dy, w.t())
    for rows in (slice(0, 1), slice(63, 70), slice(2, 130)):
        alone = [linear(x[rows], w, b), matmul.matmul(dy[rows], w.t())]
        assert total_unequal(alone, [together[rows], dx[rows]]) == 0


def test_strides_do_not_matter():
    x, w, _ = _inputs(33, torch.float32)
    y = matmul.matmul(x.t().contiguous().t(), w.t().contiguous().t())
    assert total_unequal([y], [matmul.matmul(x, w)]) == 0


LENGTHS = (150, 40, 129, 1, 128)


def _weight_gradient(
    dtype: torch.dtype, parts: list[tuple[int, int]], lengths: tuple[int, ...] = LENGTHS
) -> torch.Tensor:
    """dw, with one call for each part [first, last) of the sequences; no sequence moves."""
    dy, x = randn(5, sum(LENGTHS), N, dtype=dtype), randn(6, sum(LENGTHS), 80, dtype=dtype)
    acc = GradBuffer(torch.zeros(1, N, 80))
    for first, last in parts:
        a, b = sum(lengths[:first]), sum(lengths[:last])
        matmul.add_outer(acc, dy[a:b], x[a:b], token_blocks(lengths[first:last]))
    return acc.sums[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradient_does_not_depend_on_the_micro_batch(dtype):
    whole = _weight_gradient(dtype, [(0, 5)])
    for parts in ([(i, i + 1) for i in range(5)], [(0, 2), (2, 5)], [(0, 4), (4, 5)]):
        assert total_unequal([_weight_gradient(dtype, parts)], [whole]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_launch_adds_the_gradients_of_all_shards(dtype):
    lengths, shards, dw = [130, 20, 257], [0, 2, 3], GradBuffer(torch.zeros(4, N, 80))
    dy, x = randn(5, sum(lengths), N, dtype=dtype), randn(6, sum(lengths), 80, dtype=dtype)
    with recorded_launches(and_run=True) as launches:
        matmul.add_outer(dw, dy, x, token_blocks(lengths, shards))
    assert len(launches) == 1
    for i, shard in enumerate(shards):
        rows = slice(sum(lengths[:i]), sum(lengths[: i + 1]))
        alone = GradBuffer(torch.zeros(1, N, 80))
        matmul.add_outer(alone, dy[rows], x[rows], token_blocks([lengths[i]]))
        assert total_unequal([alone.sums[0]], [dw.sums[shard]]) == 0
    assert not dw.sums[1].any()


def test_control_another_order_or_other_blocks_give_other_bits():
    whole = _weight_gradient(torch.float32, [(0, 5)])
    assert total_unequal([_weight_gradient(torch.float32, [(1, 5), (0, 1)])], [whole]) > 0
    assert total_unequal([_weight_gradient(torch.float32, [(0, 5)], (151, 39, 129, 1, 128))], [whole]) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype):
    x, w, b = _inputs(150, dtype)
    dy = randn(7, 150, N, dtype=dtype)

    def run(ours: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, w, b)]
        y = linear(*leaves, Pass(token_blocks([110, 40]))) if ours else torch.nn.functional.linear(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

    results = run(True, dtype), run(False, dtype), run(False, torch.float64)
    for name, ours, plain, exact in zip(("y", "dx", "dw", "db"), *results, strict=True):
        assert_at_most_twice_the_error(ours, plain, exact, f"{name} {dtype}")
