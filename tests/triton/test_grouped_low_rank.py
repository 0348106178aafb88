"""Adapters of experts on Triton, interpreted: gradients, and products that they are not merged into."""

from collections.abc import Sequence

import pytest
import torch
from zerokl.kernels.expert_rows_triton import sort_slots
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.grouped_linear import add_grouped
from zerokl.kernels.launch import recorded_launches
from zerokl.kernels.low_rank import AdapterBuffers, LowRankBuffers, stacked
from zerokl.kernels.order import token_blocks

from tests.helpers import randint, randn, total_unequal
from tests.kernels.test_adapted_experts import check

# The widths of two matrices of each expert, and the width of x.
WIDTHS, K, EXPERTS, SCALE = (24, 40), 48, 4, 0.5
LENGTHS = (30, 2, 9)
# Two experts of each token; the last expert has no tokens.
IDS = torch.stack([randint(1, 2, sum(LENGTHS)), torch.full((sum(LENGTHS),), 2)], 1)


class Case:
    """Adapters of one or both matrices of each expert in one memory, as AdapterLayout places them."""

    def __init__(self, rank: int, dtype: torch.dtype, matrices: Sequence[int] = (0, 1), whole: bool = False):
        """whole: all numbers are small integers, so every sum is exact."""
        T, N = sum(LENGTHS), sum(WIDTHS)
        numel = EXPERTS * sum(rank * (K + WIDTHS[m]) for m in matrices)
        numbers = [randn(i, *shape) for i, shape in enumerate([(numel,), (T, K), (2 * T, N)])]
        flat, x, dy = (x.mul(2).round() if whole else x for x in numbers)
        self.flat, self.sums = flat, torch.zeros(2, numel)
        self.x, self.dy_slots, self.dtype = x.to(dtype), dy.to(dtype), dtype
        self.adapters, start = [], 0
        for e in range(EXPERTS):
            for m in matrices:
                first = e * N + sum(WIDTHS[:m])
                parts = []
                for shape in ((rank, K), (WIDTHS[m], rank)):
                    part = slice(start, start + shape[0] * shape[1])
                    buffer = GradBuffer(self.sums[:, part].view(2, *shape))
                    parts.append((flat[part].view(shape), buffer))
                    start = part.stop
                (a, da), (b, db) = parts
                rows = slice(first, first + WIDTHS[m])
                self.adapters.append(AdapterBuffers(rows, b, a, SCALE, db, da))

    def add(self, sequences: Sequence[int], shard: int = 0) -> None:
        """Add the gradients of these sequences."""
        starts = [sum(LENGTHS[:s]) for s in sequences]
        tokens = torch.cat([torch.arange(a, a + LENGTHS[s]) for a, s in zip(starts, sequences, strict=True)])
        rows = sort_slots(IDS[tokens], EXPERTS)
        slots = (tokens.unsqueeze(1) * 2 + torch.arange(2)).flatten()[rows.slots.long()]
        blocks = token_blocks([LENGTHS[s] for s in sequences], [shard] * len(sequences))
        add_grouped(
            LowRankBuffers(tuple(self.adapters)), self.dy_slots[slots], self.x[slots // 2], rows, blocks
        )

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        """The gradient by plain products over the tokens of each expert, flat."""
        sums, N = torch.zeros(self.sums.shape[1], dtype=dtype), sum(WIDTHS)
        for adapter in self.adapters:
            e, first = divmod(adapter.rows.start, N)
            slots = (IDS.flatten() == e).nonzero()[:, 0]
            x, dy = (
                self.x[slots // 2].to(dtype),
                self.dy_slots[slots, first : first + len(adapter.b)].to(dtype),
            )
            db = dy.T @ (SCALE * (x @ adapter.a.to(dtype).T))
            da = (SCALE * (dy @ adapter.b.to(dtype))).T @ x
            for grad, buffer in ((db, adapter.db), (da, adapter.da)):
                start = buffer.sums.storage_offset()
                sums[start : start + grad.numel()] = grad.flatten()
        return sums


@pytest.mark.parametrize("matrices", [(0, 1), (1,)], ids=str)
@pytest.mark.parametrize("rank", [1, 8])
def test_sums_of_whole_numbers_are_exact(rank, matrices):
    case = Case(rank, torch.bfloat16, matrices, whole=True)
    with recorded_launches(and_run=True) as launches:
        case.add([0, 1, 2], shard=1)
    names = [launch.kernel.__name__ for launch in launches]
    assert (names.count("_grouped_matmul"), names.count("_outer")) == (2 * len(matrices), 2 * len(matrices))
    expected = case.expected(torch.float64)
    assert total_unequal([case.sums[1]], [expected.float()]) == 0
    assert not case.sums[0].any()
    last = case.adapters[-1]
    assert expected.any()
    assert not last.db.sums.any(), "an expert without tokens"
    case.adapters.reverse()
    again = Case(rank, torch.bfloat16, matrices, whole=True)
    again.flat[0] += 1.0
    again.add([0, 1, 2], shard=1)
    assert total_unequal([again.sums[1]], [expected.float()]) > 0, "control"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_micro_batches_decide_no_bit_and_the_error_is_that_of_plain_products(dtype):
    cases = [Case(3, dtype) for _ in range(3)]
    for case, batches in zip(cases, ([[0, 1, 2]], [[0], [1, 2]], [[2], [0, 1]]), strict=True):
        for batch in batches:
            case.add(batch)
    assert total_unequal([cases[0].sums], [cases[1].sums]) == 0
    assert total_unequal([cases[0].sums], [cases[2].sums]) > 0, "control: another order"
    exact, plain = cases[0].expected(torch.float64), cases[0].expected(torch.float32)
    error, plain_error = ((x.double() - exact).abs().max() for x in (cases[0].sums[0], plain))
    assert error <= 2 * plain_error


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=str
)
def test_unmerged_products_are_accurate_and_know_one_row(dtype):
    with recorded_launches(and_run=True) as launches:
        check(dtype, slice(30, 40))
    assert "_grouped_matmul" in {launch.kernel.__name__ for launch in launches}


def test_control_adapters_in_other_memories_are_found():
    with pytest.raises(AssertionError, match="other memories"):
        stacked([torch.zeros(2, 3) for _ in range(3)])
    flat = torch.zeros(30)
    with pytest.raises(AssertionError, match="other distances"):
        stacked([flat[i : i + 6] for i in (0, 6, 14)])
