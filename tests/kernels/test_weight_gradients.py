"""Weight gradients summed into `main_grad` have the same bits for every split into micro-batches and every
thread count.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import logprob, order
from zerokl.kernels.embedding import embedding
from zerokl.kernels.linear import linear
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.order import token_blocks
from zerokl.kernels.rms_norm import add_rms_norm, rms_norm
from zerokl.kernels.sampling_params import SamplingParams

from tests.helpers import DTYPES, property_settings, randint, randn, threads, total_unequal

VOCAB = 71


class Op(NamedTuple):
    """weights(width, dtype), and run(x [T, width], ids [T], weights, blocks) -> the output the gradient comes
    from.
    """

    weights: Callable[[int, torch.dtype], list[torch.Tensor]]
    run: Callable[[torch.Tensor, torch.Tensor, list[torch.Tensor], list[tuple[int, int]]], torch.Tensor]


def _vector(D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [randn(100, D, dtype=dtype)]


def _vocabulary(D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [randn(101, VOCAB, D, dtype=dtype, scale=D**-0.5)]


OPS = {
    "linear": Op(
        lambda D, dtype: [randn(102, D + 5, D, dtype=dtype), randn(103, D + 5, dtype=dtype)],
        lambda x, ids, w, blocks: linear(x, w[0], w[1], blocks),
    ),
    "rms_norm": Op(_vector, lambda x, ids, w, blocks: rms_norm(x, w[0], 1e-6, blocks)),
    "rms_norm of heads": Op(
        _vector, lambda x, ids, w, blocks: rms_norm(torch.stack([x, 2 * x, -x], 1), w[0], 1e-6, blocks)
    ),
    "add_rms_norm": Op(_vector, lambda x, ids, w, blocks: add_rms_norm(x, -2 * x, w[0], 1e-6, blocks)[0]),
    "embedding": Op(_vocabulary, lambda x, ids, w, blocks: embedding(ids, w[0])),
    "linear_logprob": Op(
        _vocabulary,
        lambda x, ids, w, blocks: linear_logprob(x, w[0], ids, SamplingParams(0.8, 30, 0.9), blocks)[0],
    ),
}
CASES = [pytest.param(n, d, id=f"{n}-{d}".replace("torch.", "")) for n in OPS for d in DTYPES]


def main_grads(
    name: str, dtype: torch.dtype, width: int, lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The fp32 gradient buffers after a backward pass of each micro-batch, given as indices of sequences."""
    op, T = OPS[name], sum(lengths)
    out_shape = {"linear": (width + 5,), "linear_logprob": (), "rms_norm of heads": (3, width)}.get(
        name, (width,)
    )
    out_dtype = torch.float32 if name == "linear_logprob" else dtype
    data = randn(0, T, width, dtype=dtype), randint(1, VOCAB, T), randn(2, T, *out_shape, dtype=out_dtype)
    x, ids, dy = (t.split(list(lengths)) for t in data)
    weights = [w.requires_grad_() for w in op.weights(width, dtype)]
    for w in weights:
        w.main_grad = torch.zeros(w.shape)
    for batch in micro_batches:
        if batch:
            blocks = token_blocks([lengths[s] for s in batch])
            out = op.run(
                torch.cat([x[s] for s in batch]), torch.cat([ids[s] for s in batch]), weights, blocks
            )
            out.backward(torch.cat([dy[s] for s in batch]))
    assert all(w.grad is None for w in weights)  # nothing in the weight's own dtype beside the buffer
    return [w.main_grad for w in weights]


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
    together = main_grads(name, dtype, width, lengths, [sequences])
    assert total_unequal(together, main_grads(name, dtype, width, lengths, split)) == 0
    assert total_unequal(together, main_grads(name, dtype, width, lengths, [[s] for s in sequences])) == 0


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_gradient_is_independent_of_the_number_of_threads(name, dtype):
    def run(n: int) -> list[torch.Tensor]:
        with threads(n):
            return main_grads(name, dtype, 896, [130, 20, 257], [[0, 1, 2]])

    one = run(1)
    assert total_unequal(one, run(2)) == 0
    assert total_unequal(one, run(4)) == 0


def test_memory_bound_of_the_logits_decides_no_bit(monkeypatch):
    lengths = [200, 3, 150]
    before = main_grads("linear_logprob", torch.float32, 64, lengths, [[0, 1, 2]])
    monkeypatch.setattr(logprob, "CHUNK_BYTES", 1)
    assert total_unequal(before, main_grads("linear_logprob", torch.float32, 64, lengths, [[0, 1, 2]])) == 0


def test_gradient_without_a_buffer_is_the_same_sum_rounded_once():
    x, w = randn(0, 200, 48, dtype=torch.bfloat16), randn(1, 32, 48, dtype=torch.bfloat16).requires_grad_()
    dy = randn(2, 200, 32, dtype=torch.bfloat16)
    linear(x, w).backward(dy)
    returned, w.grad, w.main_grad = w.grad, None, torch.zeros(32, 48)
    linear(x, w).backward(dy)
    assert w.grad is None
    assert total_unequal([returned], [w.main_grad.bfloat16()]) == 0


# Controls. Embedding has no token blocks: its order is that of the tokens.


@pytest.mark.parametrize("name", [n for n in OPS if n != "embedding"])
def test_control_another_token_block_is_found(name, monkeypatch):
    before = main_grads(name, torch.float32, 64, [300, 200], [[0, 1]])
    monkeypatch.setattr(order, "TOKEN_BLOCK", 48)
    assert total_unequal(before, main_grads(name, torch.float32, 64, [300, 200], [[0, 1]])) > 0


@pytest.mark.parametrize("name", OPS)
def test_control_another_order_of_the_sequences_is_found(name):
    lengths = [150, 90, 40]
    in_order = main_grads(name, torch.float32, 64, lengths, [[0], [1], [2]])
    assert total_unequal(in_order, main_grads(name, torch.float32, 64, lengths, [[2], [1], [0]])) > 0


@pytest.mark.parametrize("name", [n for n in OPS if n != "embedding"])
def test_control_blocks_across_sequences_are_found(name, monkeypatch):
    lengths = [150, 90, 40]
    before = main_grads(name, torch.float32, 64, lengths, [[0, 1, 2]])
    blocks_of_one = [(a, min(a + 128, 280)) for a in range(0, 280, 128)]
    wrong = OPS[name]._replace(run=lambda x, ids, w, _, run=OPS[name].run: run(x, ids, w, blocks_of_one))
    monkeypatch.setitem(OPS, name, wrong)
    assert total_unequal(before, main_grads(name, torch.float32, 64, lengths, [[0, 1, 2]])) > 0
