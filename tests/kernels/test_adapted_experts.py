"""A mixture of experts whose LoRA adapters are not merged: beside fp64, and row by row."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from zerokl.kernels.linear import Adapted
from zerokl.kernels.low_rank import LowRank

from tests.helpers import DTYPES, randn, total_unequal
from tests.kernels.test_low_rank import assert_at_most_twice_the_error
from tests.law.experts import CHOSEN, EXPERTS, INNER, experts_of_logits, weights

T, D, RANK, SCALE = 40, 48, 5, 5 / 3
Numbers = list[torch.Tensor]


def adapted(w: torch.Tensor, matrices: int, seed: int) -> tuple[Adapted, torch.Tensor]:
    """A weight of all experts with adapters of each of its matrices; and what these add to it, in fp64.

    That is as large as the weight. All adapters lie in one memory, as AdapterLayout places them.
    """
    n, K = len(w) // EXPERTS // matrices, w.shape[1]
    flat = randn(seed, EXPERTS * matrices, RANK * (n + K), scale=0.2)
    factors = [(x[RANK * K :].view(n, RANK), x[: RANK * K].view(RANK, K)) for x in flat]
    adapters = tuple(LowRank(slice(i * n, (i + 1) * n), *ba, SCALE) for i, ba in enumerate(factors))
    return Adapted(w, adapters), torch.cat([SCALE * (b.double() @ a.double()) for b, a in factors])


def operands(dtype: torch.dtype) -> tuple[Numbers, list[Adapted], Numbers]:
    """x, logits and dy; the weights with adapters; and in fp64 what the adapters add to them."""
    _, *w = weights(D, dtype, 5)
    both = [adapted(w[0], 2, 20), adapted(w[1], 1, 21)]
    rows = [randn(i, T, n, dtype=dtype) for i, n in ((0, D), (1, EXPERTS), (2, D))]
    return rows, [weight for weight, _ in both], [added for _, added in both]


def run(rows: Numbers, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Numbers:
    """The output, and the gradients of x and logits."""
    x, logits, dy = rows[0].clone().requires_grad_(), rows[1].clone().requires_grad_(), rows[2]
    y = product(x, logits)
    y.backward(dy)
    return [y.detach(), x.grad, logits.grad]


def ours(rows: Numbers, weight: list[Adapted | torch.Tensor]) -> Numbers:
    return run(rows, lambda x, logits: experts_of_logits(x, logits, *weight)[0])


def by_torch(
    rows: Numbers, weight: list[Adapted], added: Numbers, dtype: torch.dtype, merged: bool
) -> Numbers:
    """merged: whether what the adapters add is added to the weight, as in fp64; else product by product."""
    rows = [x.to(dtype) for x in rows]

    def product(x: torch.Tensor, adapted: Adapted, delta: torch.Tensor, e: int) -> torch.Tensor:
        n, w = len(adapted.w) // EXPERTS, adapted.w.to(dtype)[e * len(adapted.w) // EXPERTS :]
        if merged:
            return x @ (w[:n] + delta[e * n : (e + 1) * n]).t()
        experts_adapters = [a for a in adapted.adapters if e * n <= a.rows.start < (e + 1) * n]
        low_rank = [SCALE * (x @ a.a.to(dtype).t() @ a.b.to(dtype).t()) for a in experts_adapters]
        return x @ w[:n].t() + torch.cat(low_rank, 1)

    def mixture(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        q, ids = logits.softmax(-1).topk(CHOSEN)
        q, y = q / q.sum(1, keepdim=True), torch.zeros_like(x)
        for e in range(EXPERTS):
            tokens, slots = (ids == e).nonzero(as_tuple=True)
            gate, up = product(x[tokens], weight[0], added[0], e).split(INNER, 1)
            out = product(F.silu(gate) * up, weight[1], added[1], e) * q[tokens, slots].unsqueeze(1)
            y = y.index_add(0, tokens, out)
        return y

    return run(rows, mixture)


def check(dtype: torch.dtype, *parts: slice) -> None:
    """Accuracy of all tokens; and that the tokens of each part, alone, have the same bits."""
    rows, weight, added = operands(dtype)
    whole = ours(rows, weight)
    plain = by_torch(rows, weight, added, dtype, merged=False)
    exact = by_torch(rows, weight, added, torch.float64, merged=True)
    for name, *results in zip(("y", "dx", "dlogits"), whole, plain, exact, strict=True):
        assert_at_most_twice_the_error(*results, f"{name}, {dtype}")
    for part in parts:
        rows_of_part, expected = [x[part] for x in rows], [x[part] for x in whole]
        assert total_unequal(ours(rows_of_part, weight), expected) == 0
        assert total_unequal(ours(rows_of_part, [w.w for w in weight]), expected) > 0, "control: no adapters"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_accurate_and_no_row_knows_another(dtype):
    check(dtype, slice(0, 1), slice(7, 40))
