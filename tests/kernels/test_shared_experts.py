"""Ranks that share experts have the bits of one rank; rows that lose their order or their way are seen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels.combine_experts import combine_experts
from zerokl.kernels.expert_rows import Rows, expert_rows
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.grouped_linear import grouped_linear
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass
from zerokl.kernels.shared_experts import SharedExperts
from zerokl.kernels.silu_mul import silu_mul

from tests.helpers import DTYPES, property_settings, randn, threads, total_unequal
from tests.kernels.test_shared_sums import ThreadRank, on_ranks

D, SIZE, E, K = 32, 16, 8, 3
LENGTHS = [7, 150, 1, 140, 30]


def results(
    lengths: list[int], dtype: torch.dtype, ids: torch.Tensor, ranks: ThreadRank | None = None
) -> list[list[torch.Tensor]]:
    """y, dx and dq; and the gradients of the weights of two virtual shards, cut by rows."""
    T, half = sum(lengths), len(lengths) // 2
    x, q = randn(0, T, D, dtype=dtype).requires_grad_(), randn(1, T, K).abs().requires_grad_()
    w = [randn(2, E * 2 * SIZE, D, dtype=dtype), randn(3, E * D, SIZE, dtype=dtype)]
    if ranks is not None:
        w = [part.chunk(ranks.size)[ranks.rank].clone() for part in w]
    buffers = {part.requires_grad_(): GradBuffer(torch.zeros(2, *part.shape)) for part in w}
    shards = [int(i >= half) for i in range(len(lengths))]
    in_pass = Pass(token_blocks(lengths, shards), buffers)

    def weighted(x: torch.Tensor, q: torch.Tensor, rows: Rows) -> torch.Tensor:
        h = silu_mul(grouped_linear(x, w[0], rows, in_pass))
        return combine_experts(h, w[1], q, rows, in_pass)

    if ranks is None:
        y = weighted(x, q, expert_rows(ids, E, x))
    else:
        y = SharedExperts(ranks).mixture(x, q, ids, E, weighted)
    y.backward(randn(4, T, D, dtype=dtype))
    return [[y.detach(), x.grad, q.grad], *(list(b.zeroed([0, 1])) for b in buffers.values())]


def choice(seed: int, T: int, experts: int = E) -> torch.Tensor:
    return torch.rand(T, experts, generator=torch.Generator().manual_seed(seed)).topk(K).indices


def unequal(n: int, lengths: list[int], dtype: torch.dtype, ids: torch.Tensor, carried=lambda x: x) -> int:
    with threads(1):
        alone = results(lengths, dtype, ids)
        ranks = on_ranks(n, lambda leaves: results(lengths, dtype, ids, leaves.ranks), carried)
    different = sum(total_unequal(rank[0], alone[0]) for rank in ranks)
    for i in (1, 2):
        joined = [torch.cat(parts) for parts in zip(*(rank[i] for rank in ranks), strict=True)]
        different += total_unequal(joined, alone[i])
    return different


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_have_the_bits_of_one(dtype):
    assert unequal(4, LENGTHS, dtype, choice(0, sum(LENGTHS))) == 0


@property_settings(10)
@given(
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=4),
    n=st.sampled_from([2, 4, 8]),
    experts=st.sampled_from([K, E]),
    seed=st.integers(0, 99),
)
def test_no_length_and_no_choice_shows_the_ranks(lengths, n, experts, seed):
    """Also where ranks have no row, and where they add up no token."""
    assert unequal(n, lengths, torch.bfloat16, choice(seed, sum(lengths), experts)) == 0


FAULTS = {
    "rows come back in another order": lambda parts: [part.flip(0) for part in parts],
    "rows of a rank are lost": lambda parts: [torch.zeros_like(parts[0]), *parts[1:]],
    "ranks in another order": lambda parts: list(torch.cat(parts[::-1]).split(list(map(len, parts)))),
    "nothing": lambda parts: parts,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_carrier_is_seen(fault):
    different = unequal(2, LENGTHS, torch.bfloat16, choice(0, sum(LENGTHS)), FAULTS[fault])
    assert (different == 0) == (fault == "nothing")


def test_the_bytes_that_docs_scale_has_are_those_that_are_sent():
    n, T, bytes_of_a_row = 4, 64, 2 * D
    ids = choice(0, T)
    away = int((ids // (E // n) != torch.arange(T).unsqueeze(1) // (T // n)).sum())

    def sent(leaves):
        results([T], torch.bfloat16, ids, leaves.ranks)
        return leaves.ranks.sent

    to_all = (n - 1) * T * (2 * bytes_of_a_row + 4 * K)
    assert sum(on_ranks(n, sent)) == away * (2 * bytes_of_a_row + 4) + to_all
