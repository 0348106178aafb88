"""Ranks that share leaves have the bits of one rank, and a carrier that adds or rounds is seen."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.embedding import embedding
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.leaves import Leaves
from zerokl.kernels.linear import Adapted, linear
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.low_rank import AdapterBuffers, LowRank, LowRankBuffers
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass
from zerokl.kernels.qk_norm import qk_norm
from zerokl.kernels.sampling_params import SamplingParams

from tests.helpers import DTYPES, property_settings, randint, randn, threads, total_unequal

COUNT, T, D = 8, 30, 32


class ThreadRank:
    """One of several ranks that are threads. carried: a control's fault in what is carried."""

    def __init__(self, rank: int, barrier: threading.Barrier, places: list, carried=lambda parts: parts):
        self.rank, self.size, self._barrier, self._places = rank, len(places), barrier, places
        self._carried, self.sent = carried, 0

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.sent += x.nbytes * (self.size - 1)
        return self._met(x, lambda other: other)

    def exchange(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        self.sent += parts[0].nbytes * (self.size - 1)
        return self._met(parts, lambda other: other[self.rank])

    def exchange_rows(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        self.sent += x.nbytes // max(len(x), 1) * (len(x) - sent[self.rank])
        parts = self._met(x.split(sent), lambda other: other[self.rank])
        assert list(map(len, parts)) == received
        return torch.cat(parts)

    def _met(self, given, taken) -> list[torch.Tensor]:
        self._places[self.rank] = given
        self._barrier.wait()
        parts = self._carried([taken(other).clone() for other in self._places])
        self._barrier.wait()
        return parts


def on_ranks(n: int, work: Callable[[Leaves], Any], carried=lambda parts: parts) -> list[Any]:
    """What work(leaves) returns in each of n ranks."""
    results, errors = [None] * n, []
    barrier, places = threading.Barrier(n), [None] * n

    def run(rank: int) -> None:
        try:
            results[rank] = work(Leaves(COUNT, ThreadRank(rank, barrier, places, carried)))
        except Exception as error:
            errors.append(error)
            barrier.abort()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if errors:
        raise errors[0]
    return results


def own(x: torch.Tensor, leaves: Leaves, dim: int = 0) -> torch.Tensor:
    return x.chunk(leaves.ranks.size, dim)[leaves.ranks.rank].contiguous()


def block(leaves: Leaves, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Outputs, and the gradients that a rank has whole, then those of its rows and of its columns."""
    ids, x = randint(0, 64, T), randn(1, T, D, dtype=dtype).requires_grad_()
    embed = own(randn(2, 64, D, dtype=dtype), leaves).requires_grad_()
    gates = [own(randn(i, 64, D, dtype=dtype), leaves) for i in (3, 4)]
    gate_up = torch.cat(gates).requires_grad_()
    down = own(randn(5, D, 64, dtype=dtype, scale=0.1), leaves, 1).requires_grad_()
    norms = [randn(i, 16, dtype=dtype).requires_grad_() for i in (6, 7)]
    h = x + embedding(ids, embed, leaves=leaves)
    gate, up = linear(h, gate_up, cut=leaves.outputs(*map(len, gates))).chunk(2, 1)
    heads = torch.cat(
        [gate.unflatten(1, (-1, 4)).repeat(1, 1, 4), up.unflatten(1, (-1, 4)).repeat(1, 1, 4)], 1
    )
    normed = qk_norm(heads, *norms, heads.shape[1] // 2, 1e-6, leaves=leaves)[:, :, :4].flatten(1)
    y = linear(normed[:, : gate.shape[1]] * up, down, cut=leaves.inputs(down.shape[1]))
    (y.sum() + y.square().sum()).backward()
    whole = [y.detach(), x.grad, *(norm.grad for norm in norms)]
    return [whole, [embed.grad], [*gate_up.grad.chunk(2)], [down.grad]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_block_has_the_bits_of_one_rank(n, dtype):
    with threads(1):
        alone = block(Leaves(COUNT), dtype)
        ranks = on_ranks(n, lambda leaves: block(leaves, dtype))
    for rank in ranks:
        assert total_unequal(rank[0], alone[0]) == 0
    for group, dim in ((1, 0), (2, 0), (3, 1)):
        joined = [torch.cat(parts, dim) for parts in zip(*(rank[group] for rank in ranks), strict=True)]
        assert total_unequal(joined, alone[group]) == 0


def head(leaves: Leaves, dtype: torch.dtype, params: SamplingParams, cap: float, seed: int = 0) -> list:
    h, ids = randn(seed, T, D, dtype=dtype).requires_grad_(), randint(seed + 1, 64, T)
    w = own(randn(seed + 2, 64, D, dtype=dtype), leaves).requires_grad_()
    if params.truncates:  # a token that is kept
        ids = torch.nn.functional.linear(h, randn(seed + 2, 64, D, dtype=dtype)).argmax(1)
    logp, entropy = linear_logprob(h, w, ids, params, cap=cap, leaves=leaves)
    (logp * randn(seed + 3, T)).sum().backward()
    return [[logp.detach(), entropy, h.grad], w.grad]


@property_settings(20)
@given(
    st.sampled_from([2, 4, 8]),
    st.sampled_from(DTYPES),
    st.sampled_from(
        [
            SamplingParams(),
            SamplingParams(0.7),
            SamplingParams(0.8, 9, 0.9, 0.01),
            SamplingParams.of(1.0, 0, 1.0, 0.0, {1: 0.5, 60: -0.5}),
        ]
    ),
    st.sampled_from([0.0, 5.0]),
    st.integers(0, 9),
)
def test_scores_over_a_shared_vocabulary_are_those_of_one_rank(n, dtype, params, cap, seed):
    with threads(1):
        alone = head(Leaves(COUNT), dtype, params, cap, seed)
        ranks = on_ranks(n, lambda leaves: head(leaves, dtype, params, cap, seed))
    for rank in ranks:
        assert total_unequal(rank[0], alone[0]) == 0
    assert count_unequal(torch.cat([rank[1] for rank in ranks]), alone[1]) == 0


def adapted(leaves: Leaves, dtype: torch.dtype, is_down: bool, merged: bool) -> list[list[torch.Tensor]]:
    """What all ranks have of an adapted product, and what each has a part of; two matrices if N is cut."""
    parts = [64] if is_down else [64, 32]
    x, dy = randn(1, T, 64, dtype=dtype), randn(2, T, sum(parts), dtype=dtype)
    w = randn(3, sum(parts), 64, dtype=dtype, scale=0.1)
    factors, rows = [], 0
    for i, n in enumerate(parts):
        b, a = randn(4 + i, n, 3), randn(6 + i, 3, 64)
        b, a = (b, own(a, leaves, 1)) if is_down else (own(b, leaves), a)
        factors.append((slice(rows, rows + len(b)), b, a))
        rows += len(b)
    if is_down:
        x, w, cut = own(x, leaves, 1), own(w, leaves, 1), leaves.inputs(64 // leaves.ranks.size)
    else:
        dy, w = (torch.cat([own(x, leaves, d) for x in t.split(parts, d)], d) for t, d in ((dy, 1), (w, 0)))
        cut = leaves.outputs(*(len(b) for _, b, _ in factors))
    x, w = x.requires_grad_(), w.requires_grad_(merged)
    buffers = [AdapterBuffers(*f, 5 / 3, *map(GradBuffer.like, f[1:])) for f in factors]
    weight = w if merged else Adapted(w, tuple(LowRank(*f, 5 / 3) for f in factors))
    in_pass = Pass(token_blocks([T]), {w: LowRankBuffers(tuple(buffers))})
    y = linear(x, weight, None, in_pass, cut=cut)
    y.backward(dy)
    das, dbs = ([getattr(x, name).zeroed([0])[0] for x in buffers] for name in ("da", "db"))
    return [[y.detach(), *dbs], [x.grad, *das]] if is_down else [[x.grad, *das], [y.detach(), *dbs]]


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("is_down", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_adapters_have_the_bits_of_one_rank(n, dtype, is_down, merged):
    with threads(1):
        whole, cut = adapted(Leaves(COUNT), dtype, is_down, merged)
        ranks = on_ranks(n, lambda leaves: adapted(leaves, dtype, is_down, merged))
    for rank in ranks:
        assert total_unequal(rank[0], whole) == 0
    assert all(x.any() for x in (*whole, *cut))
    for i, expected in enumerate(cut):
        parts = [rank[1][i] for rank in ranks]
        if is_down or i:
            assert count_unequal(torch.cat(parts, int(is_down)), expected) == 0
        else:  # the columns of y are of both matrices
            both = zip(*(part.split([64 // n, 32 // n], 1) for part in parts), strict=True)
            assert count_unequal(torch.cat([x for matrix in both for x in matrix], 1), expected) == 0


def test_control_adapters_without_leaves_or_with_rounded_ones_have_other_bits():
    def faulty(leaves: Leaves) -> list[torch.Tensor]:
        return adapted(leaves, torch.float32, True, True)[0]

    with threads(1):
        expected = faulty(Leaves(COUNT))
        rounded = on_ranks(2, faulty, lambda parts: [part.bfloat16().float() for part in parts])[0]
        assert count_unequal(rounded[1], expected[1]) > 0
        assert count_unequal(faulty(Leaves(1))[1], expected[1]) > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_control_sums_that_are_rounded_on_their_way_or_come_in_another_order_are_seen(dtype):
    x, w = randn(0, 400, 256, dtype=dtype), randn(1, 256, 256, dtype=dtype)
    expected = linear(x, w, cut=Leaves(COUNT).inputs(256))

    def product(leaves: Leaves) -> torch.Tensor:
        part = own(w, leaves, 1)
        return linear(own(x, leaves, 1), part, cut=leaves.inputs(part.shape[1]))

    faults = {
        "none": lambda parts: parts,
        "rounded": lambda parts: [part.bfloat16().float() for part in parts],
        "a chain": lambda parts: [
            ((parts[0] + parts[1]) + parts[2]) + parts[3],
            *map(torch.zeros_like, parts[1:]),
        ],
        "crossed": lambda parts: [parts[0], parts[2], parts[1], parts[3]],
    }
    with threads(1):
        wrong = {name: count_unequal(on_ranks(4, product, f)[0], expected) for name, f in faults.items()}
    assert wrong.pop("none") == 0
    assert all(wrong.values()), wrong


def test_control_a_row_of_minus_zeros_is_carried_and_not_added():
    w = torch.full((64, D), -0.0)
    rows = on_ranks(4, lambda leaves: embedding(randint(0, 64, T), own(w, leaves), leaves=leaves))
    assert total_unequal(rows, [w[:T]] * 4) == 0
    assert count_unequal(torch.zeros(T, D) + w[:T], w[:T]) == T * D


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 3, 501])
def test_large_sums_go_by_parts_with_the_same_bits_and_fewer_bytes(n, rows):
    x = randn(0, rows, 256)
    leaves = [x * i for i in range(1, 9)]

    def joined(shared: Leaves) -> tuple[torch.Tensor, int]:
        first = shared.ranks.rank * shared.mine
        return shared.join([leaf.clone() for leaf in leaves[first : first + shared.mine]]), shared.ranks.sent

    expected = Leaves(COUNT).join([leaf.clone() for leaf in leaves])
    ranks = on_ranks(n, joined)
    assert all(count_unequal(y, expected) == 0 for y, _ in ranks)
    by_parts = n > 2 and rows == 501
    carried = 2 * -(-rows // n) if by_parts else rows
    assert {sent for _, sent in ranks} == {(n - 1) * carried * 256 * 4}
