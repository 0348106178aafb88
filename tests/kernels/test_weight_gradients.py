"""Weight gradients in fp32 buffers have the same bits for any micro-batches and any number of threads."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import logprob, order
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.linear import linear
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass

from tests.helpers import (
    DTYPES,
    property_settings,
    randn,
    sums_of,
    threads,
    total_unequal,
    zero_buffers,
)
from tests.law.gradients import OPS, shard_grads, summed_grads

CASES = [pytest.param(n, d, id=f"{n}-{d}".replace("torch.", "")) for n in OPS for d in DTYPES]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@property_settings(12)
@given(
    width=st.sampled_from([1, 16, 33, 64, 100]),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    cuts=st.sets(st.integers(1, 4)),
)
def test_micro_batches_of_any_split_give_the_same_gradient(name, dtype, width, lengths, cuts):
    sequences = range(len(lengths))
    bounds = [0, *sorted(c for c in cuts if c < len(lengths)), len(lengths)]
    split = [sequences[a:b] for a, b in pairwise(bounds)]
    together = summed_grads(OPS[name], dtype, width, lengths, [sequences])
    assert total_unequal(together, summed_grads(OPS[name], dtype, width, lengths, split)) == 0
    one_by_one = [[s] for s in sequences]
    assert total_unequal(together, summed_grads(OPS[name], dtype, width, lengths, one_by_one)) == 0


@pytest.mark.parametrize(("name", "dtype"), CASES)
@property_settings(12)
@given(
    width=st.sampled_from([16, 33, 64]),
    shards=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=3), min_size=2, max_size=4),
)
def test_shards_in_one_pass_have_the_gradients_of_each_alone(name, dtype, width, shards):
    together = shard_grads(OPS[name], dtype, width, shards, together=True)
    assert total_unequal(together, shard_grads(OPS[name], dtype, width, shards, together=False)) == 0
    swapped = [buffers.flip(0) for buffers in together]  # control
    assert total_unequal(together, swapped) > 0


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_gradient_is_independent_of_the_number_of_threads(name, dtype):
    def run(n: int) -> list[torch.Tensor]:
        with threads(n):
            return summed_grads(OPS[name], dtype, 896, [130, 20, 257], [[0, 1, 2]])

    one_thread = run(1)
    assert total_unequal(one_thread, run(2)) == 0
    assert total_unequal(one_thread, run(4)) == 0


def test_memory_bound_of_the_logits_decides_no_bit(monkeypatch):
    op, lengths = OPS["linear_logprob"], [200, 3, 150]
    before = summed_grads(op, torch.float32, 64, lengths, [[0, 1, 2]])
    monkeypatch.setattr(logprob, "CHUNK_BYTES", 1)
    assert total_unequal(before, summed_grads(op, torch.float32, 64, lengths, [[0, 1, 2]])) == 0


def _first_logprob(x: torch.Tensor, w: torch.Tensor, in_pass: Pass) -> torch.Tensor:
    return logprob.linear_logprob(x, w, torch.zeros(len(x), dtype=torch.long), in_pass=in_pass)[0]


@pytest.mark.parametrize("op", [linear, _first_logprob])
def test_a_buffer_to_which_no_row_adds_stays_marked_as_empty(op):
    w = torch.randn(16, 8, requires_grad=True)
    buffer = GradBuffer(torch.full((1, *w.shape), float("nan")), empty=[0])
    for rows, empty in ((0, {0}), (3, set())):
        op(torch.ones(rows, 8, requires_grad=True), w, in_pass=Pass(buffers={w: buffer})).sum().backward()
        assert buffer.empty == empty
    assert buffer.sums.isfinite().all()


def test_gradient_without_a_buffer_is_the_same_sum_rounded_once():
    x, w = randn(0, 200, 48, dtype=torch.bfloat16), randn(1, 32, 48, dtype=torch.bfloat16).requires_grad_()
    dy = randn(2, 200, 32, dtype=torch.bfloat16)
    linear(x, w).backward(dy)
    returned, w.grad, buffers = w.grad, None, zero_buffers([w])
    linear(x, w, in_pass=Pass(buffers=buffers)).backward(dy)
    assert w.grad is None
    assert total_unequal([returned], [sums_of(buffers)[0].bfloat16()]) == 0


# Controls. Embedding has no token blocks: it adds the tokens one after another.


@pytest.mark.parametrize("name", [n for n in OPS if n != "embedding"])
def test_control_another_token_block_is_found(name, monkeypatch):
    before = summed_grads(OPS[name], torch.float32, 64, [300, 200], [[0, 1]])
    monkeypatch.setattr(order, "TOKEN_BLOCK", 48)
    assert total_unequal(before, summed_grads(OPS[name], torch.float32, 64, [300, 200], [[0, 1]])) > 0


@pytest.mark.parametrize("name", OPS)
def test_control_another_order_of_the_sequences_is_found(name):
    lengths = [150, 90, 40]
    in_order = summed_grads(OPS[name], torch.float32, 64, lengths, [[0], [1], [2]])
    assert total_unequal(in_order, summed_grads(OPS[name], torch.float32, 64, lengths, [[2], [1], [0]])) > 0


@pytest.mark.parametrize("name", [n for n in OPS if n != "embedding"])
def test_control_blocks_across_sequences_are_found(name):
    lengths = [150, 90, 40]
    before = summed_grads(OPS[name], torch.float32, 64, lengths, [[0, 1, 2]])
    # Token blocks as if the three sequences were one.
    blocks = token_blocks([280])
    wrong = OPS[name]._replace(
        run=lambda x, ids, w, in_pass: OPS[name].run(x, ids, w, replace(in_pass, blocks=blocks))
    )
    assert total_unequal(before, summed_grads(wrong, torch.float32, 64, lengths, [[0, 1, 2]])) > 0
