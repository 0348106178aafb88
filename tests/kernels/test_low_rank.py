"""Gradients of adapters from rows: accuracy against fp64, and the parts of a weight.

Adapters that are not merged: y and dx beside fp64, the law, and an update that a rounding would swallow.

tests/law/gradients.py has gradients among those of all weights: micro-batches, shards, threads, orders.
"""

from itertools import chain

import pytest
import torch
from torch.nn.functional import linear as linear_of_torch
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.linear import Adapted, linear
from zerokl.kernels.low_rank import AdapterBuffers, LowRank, LowRankBuffers
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass

from tests.helpers import DTYPES, assert_at_most_twice_the_error, randn, sums_of, total_unequal

N, K, LENGTHS = 70, 40, [200, 3, 150]


def operands(dtype: torch.dtype, rank: int) -> tuple[torch.Tensor, ...]:
    """x, dy, w, b and a."""
    x, dy = randn(1, sum(LENGTHS), K, dtype=dtype), randn(2, sum(LENGTHS), N, dtype=dtype)
    return x, dy, randn(3, N, K, dtype=dtype), randn(4, N, rank), randn(5, rank, K)


def gradients(
    x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, parts: list[tuple[slice, torch.Tensor, torch.Tensor]]
) -> list[torch.Tensor]:
    """db and da of each part, by the backward of linear."""
    w = w.detach().requires_grad_()
    adapters = [AdapterBuffers(rows, b, a, 5 / 3, *map(GradBuffer.like, (b, a))) for rows, b, a in parts]
    buffers = {w: LowRankBuffers(tuple(adapters))}
    linear(x, w, None, Pass(token_blocks(LENGTHS), buffers)).backward(dy)
    assert w.grad is None
    return sums_of(dict(enumerate(chain.from_iterable((x.db, x.da) for x in adapters))))


def by_autograd(rank: int, dtype: torch.dtype, compute: torch.dtype) -> list[torch.Tensor]:
    """db and da by plain torch and autograd in `compute`, as PEFT has them, of operands in `dtype`."""
    x, dy, w, b, a = (t.to(compute) for t in operands(dtype, rank))
    b, a = b.requires_grad_(), a.requires_grad_()
    (linear_of_torch(x, w) + 5 / 3 * linear_of_torch(linear_of_torch(x, a), b)).backward(dy)
    return [b.grad, a.grad]


def check_accuracy(rank: int, dtype: torch.dtype) -> None:
    x, dy, w, b, a = operands(dtype, rank)
    ours = gradients(x, dy, w, [(slice(0, N), b, a)])
    plain, exact = (by_autograd(rank, dtype, compute) for compute in (torch.float32, torch.float64))
    for name, *grads in zip("ba", ours, plain, exact, strict=True):
        assert_at_most_twice_the_error(*grads, f"d{name} at rank {rank}, {dtype}")


@pytest.mark.parametrize("rank", [1, 5, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_is_that_of_autograd_in_fp64(dtype, rank):
    check_accuracy(rank, dtype)


def test_in_fp64_it_is_that_of_autograd():
    x, dy, w, b, a = operands(torch.float64, 5)
    grads = gradients(x, dy, w, [(slice(0, N), b.double(), a.double())])
    for ours, expected in zip(grads, by_autograd(5, torch.float64, torch.float64), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)


def check_parts(dtype: torch.dtype) -> None:
    """q, k and v are parts of one weight. k has no adapter here."""
    x, dy, w, b, a = operands(dtype, 4)
    rows = slice(0, 30), slice(50, 70)
    parts = [(part, b[part].contiguous(), a * i) for i, part in enumerate(rows, 1)]
    alone = [
        grad
        for part, *factors in parts
        for grad in gradients(x, dy[:, part].contiguous(), w[part], [(slice(0, None), *factors)])
    ]
    assert total_unequal(gradients(x, dy, w, parts), alone) == 0
    shifted = [(slice(part.start + 1, part.stop + 1), *factors) for part, *factors in parts[:1]]
    assert total_unequal(gradients(x, dy, w, shifted), alone[:2]) > 0, "control"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_has_the_gradient_of_its_own_matrix(dtype):
    check_parts(dtype)


def unmerged(
    dtype: torch.dtype, rank: int, rows: slice = slice(None), bias: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and dx of two adapted parts of one weight, of these rows of x."""
    x, dy, w, b, a = operands(dtype, rank)
    x, dy = x[rows].clone().requires_grad_(), dy[rows].contiguous()
    parts = slice(0, 30), slice(50, 70)
    adapters = tuple(LowRank(part, b[part], a * i, 5 / 3) for i, part in enumerate(parts, 1))
    y = linear(x, Adapted(w, adapters), randn(6, N, dtype=dtype) if bias else None)
    y.backward(dy)
    return y.detach(), x.grad


def unmerged_by_torch(dtype: torch.dtype, rank: int, compute: torch.dtype, bias: bool) -> list[torch.Tensor]:
    x, dy, w, b, a = (t.to(compute) for t in operands(dtype, rank))
    x.requires_grad_()
    y = linear_of_torch(x, w, randn(6, N, dtype=dtype).to(compute) if bias else None)
    for i, part in enumerate((slice(0, 30), slice(50, 70)), 1):
        y = y.index_add(1, torch.arange(N)[part], 5 / 3 * linear_of_torch(linear_of_torch(x, a * i), b[part]))
    y.backward(dy)
    return [y.detach(), x.grad]


def check_unmerged_accuracy(rank: int, dtype: torch.dtype) -> None:
    for bias in (False, True):
        plain, exact = (unmerged_by_torch(dtype, rank, c, bias) for c in (dtype, torch.float64))
        for name, *results in zip(("y", "dx"), unmerged(dtype, rank, bias=bias), plain, exact, strict=True):
            assert_at_most_twice_the_error(*results, f"{name} at rank {rank}, {dtype}, bias {bias}")


@pytest.mark.parametrize("rank", [1, 5, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unmerged_products_are_accurate(dtype, rank):
    check_unmerged_accuracy(rank, dtype)


def check_unmerged_rows(dtype: torch.dtype) -> None:
    whole = unmerged(dtype, 5, bias=True)
    for rows in (slice(0, 1), slice(7, 40), slice(100, 353)):
        assert total_unequal(unmerged(dtype, 5, rows, bias=True), [t[rows] for t in whole]) == 0
    assert total_unequal(unmerged(dtype, 5, slice(1, 2)), [t[:1] for t in whole]) > 0, "control"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_row_of_an_unmerged_product_knows_another(dtype):
    check_unmerged_rows(dtype)


def test_an_adapter_that_no_weight_in_bf16_holds_is_not_lost():
    """Its mean effect is there in the unmerged product, and nothing of it in the merged weight."""
    x, _, w, b, a = operands(torch.bfloat16, 4)
    b, a = b.abs() * 1e-5, a.abs()
    x = x.abs()
    added = (x.double() @ a.double().t() @ b.double().t()).mean()
    y = [linear(x, weight).double().mean() for weight in (w, Adapted(w, (LowRank(slice(0, N), b, a, 1.0),)))]
    merged = (w.float() + b @ a).to(torch.bfloat16)
    assert float((merged != w).float().mean()) < 0.1
    assert float(y[1] - y[0]) == pytest.approx(float(added), rel=0.2)
