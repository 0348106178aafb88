"""Gradients of adapters from rows: accuracy against fp64, and the parts of a weight.

tests/law/gradients.py has them among all weight gradients: micro-batches, shards, threads, blocks, orders.
"""

from itertools import chain

import pytest
import torch
from torch.nn.functional import linear as linear_of_torch
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.linear import linear
from zerokl.kernels.low_rank import AdapterBuffers, LowRankBuffers
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
