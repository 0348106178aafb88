"""Sums by leaves: equal to the same computed by slices, other orders are seen, and fp64 judges them."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from zerokl.files.bitwise import count_unequal
from zerokl.kernels.cpp import library
from zerokl.kernels.draw import draw_tokens
from zerokl.kernels.leaves import Leaves
from zerokl.kernels.linear import linear
from zerokl.kernels.logprob import linear_logprob, token_logprobs
from zerokl.kernels.matmul import matmul, matmul_leaves, pack_weights
from zerokl.kernels.order import sum_row, tree_sum
from zerokl.kernels.qk_norm import qk_norm
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.truncation import scaled_logits

from tests.helpers import (
    DTYPES,
    assert_at_most_twice_the_error,
    property_settings,
    randint,
    randn,
    threads,
    total_unequal,
)

COUNTS = (2, 4, 8)


def pairs(parts: list[torch.Tensor]) -> torch.Tensor:
    """The tree of leaves, as the law has it."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


def chain(parts: list[torch.Tensor]) -> torch.Tensor:
    """A control: one leaf after another."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def rounded(parts: list[torch.Tensor]) -> torch.Tensor:
    """A control: each rank's sum is rounded to bf16, as vLLM sends it."""
    return pairs([part.bfloat16().float() for part in parts])


def sliced(x, w, widths, count, join=pairs):
    """x w^T in x's dtype: each leaf is a product of copies of its slices."""

    def leaf(i, operand):
        parts = operand.float().split(widths, 1)
        return torch.cat([p[:, i * p.shape[1] // count :][:, : p.shape[1] // count] for p in parts], 1)

    return join([matmul(leaf(i, x).clone(), leaf(i, w).clone()) for i in range(count)]).to(x.dtype)


@property_settings(40)
@given(
    st.integers(1, 140),
    st.sampled_from([16, 48, 80]),
    st.sampled_from([(8,), (64,), (128,), (1056,), (64, 16, 16), (40, 40)]),
    st.sampled_from(COUNTS),
    st.sampled_from(DTYPES),
    st.integers(1, 2),
)
def test_a_product_is_the_tree_of_the_products_of_slices(T, N, widths, count, dtype, n_threads):
    K, leaves = sum(widths), Leaves(count)
    x, w = randn(T, T, K, dtype=dtype), randn(1, N, K, dtype=dtype)
    expected = sliced(x, w, widths, count)
    with threads(n_threads):
        assert count_unequal(linear(x, w, cut=leaves.inputs(*widths)), expected) == 0
        # dx of a weight [K, N] is the same sum, over its rows.
        rows = torch.zeros(T, N, dtype=dtype, requires_grad=True)
        linear(rows, w.t().contiguous(), cut=leaves.outputs(*widths)).backward(x)
        assert count_unequal(rows.grad, expected) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_control_other_joins_are_seen(dtype):
    x, w = randn(0, 1024, 512, dtype=dtype), randn(1, 256, 512, dtype=dtype)
    y = linear(x, w, cut=Leaves(8).inputs(512))
    assert count_unequal(y, linear(x, w)) > 0
    assert count_unequal(y, linear(x, w, cut=Leaves(4).inputs(512))) > 0
    for join in (chain, rounded):
        assert count_unequal(y, sliced(x, w, (512,), 8, join)) > 0


def test_one_leaf_and_packed_weights_change_no_bit():
    x, w = randn(0, 40, 128), randn(1, 64, 128)
    assert count_unequal(linear(x, w, cut=Leaves(1).inputs(128)), linear(x, w)) == 0
    with threads(1):
        packed = pack_weights([w], {w: 8}).get(w)
        assert (packed is None) == (library() is None)
        assert count_unequal(matmul_leaves(x, w, 8, (128,), packed), matmul_leaves(x, w, 8, (128,))) == 0


def test_control_leaves_that_the_ranks_do_not_divide_are_refused():
    for count, size in ((0, 1), (3, 1), (16, 1), (2, 4)):
        with pytest.raises(ValueError, match=rf"leaves \({count}\) must be 1, 2, 4 or 8, and a multiple"):
            Leaves(count, SimpleNamespace(size=size))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("T", [1, 7])
def test_draw_and_score_have_one_sum_over_the_vocabulary(count, T):
    leaves, V = Leaves(count), 96
    h, w = randn(0, T, 32), randn(1, V, 32)
    u = torch.rand(T, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for params in (SamplingParams(), SamplingParams(0.7, 9, 0.9), SamplingParams(0.0)):
        for n_threads in (1, 2):
            with threads(n_threads):
                ids, drawn = draw_tokens(matmul(h, w), u, params, leaves=leaves)
                assert count_unequal(ids, draw_tokens(matmul(h, w), u, params)[0]) == 0
                assert count_unequal(linear_logprob(h, w, ids, params, leaves=leaves)[0], drawn) == 0
    z = scaled_logits(matmul(h, w), SamplingParams())
    shifted = z - z.amax(1, keepdim=True)
    total = pairs([sum_row(leaf) for leaf in torch.exp(shifted).chunk(count, 1)])
    expected = shifted.gather(1, ids.unsqueeze(1)).squeeze(1) - torch.log(total)
    assert count_unequal(linear_logprob(h, w, ids, leaves=leaves)[0], expected) == 0


def test_control_the_sum_over_the_vocabulary_has_other_bits_with_leaves():
    h, w, ids = randn(0, 300, 32), randn(1, 96, 32), randint(2, 96, 300)
    with_leaves = linear_logprob(h, w, ids, leaves=Leaves(8))
    assert all(count_unequal(a, b) > 0 for a, b in zip(with_leaves, linear_logprob(h, w, ids), strict=True))
    assert count_unequal(token_logprobs(matmul(h, w), ids)[0], linear_logprob(h, w, ids)[0]) == 0


def norm_gradients(heads, kv, leaves, dtype=torch.float32, T=50, D=16):
    x, dy = (randn(i, T, heads + kv, D, dtype=dtype) for i in range(2))
    wq, wk = (randn(i, D, dtype=dtype).requires_grad_() for i in (2, 3))
    qk_norm(x, wq, wk, heads, 1e-6, leaves=leaves).backward(dy)
    return x, dy, wq.grad, wk.grad


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("n_threads", [1, 2])
def test_the_gradient_of_a_norm_of_heads_is_the_tree_of_its_leaves(count, n_threads):
    with threads(n_threads):
        x, dy, dwq, dwk = norm_gradients(16, 8, Leaves(count))
    # A norm of one head at a time has the rows that the heads' tree adds up; so for each leaf.
    per_leaf = []
    for first, end in ((0, 16), (16, 24)):
        n = (end - first) // count
        xh = x * (x * x).mean(2, keepdim=True).add(1e-6).sqrt().reciprocal()
        rows = [tree_sum((dy * xh)[:, a : a + n], 1) for a in range(first, end, n)]
        per_leaf.append(tree_sum(F.pad(pairs(rows), (0, 0, 0, 64 - len(x))), 0))
    assert total_unequal([dwq, dwk], per_leaf) == 0
    assert total_unequal([dwq], [norm_gradients(16, 8, Leaves())[2]]) > 0, "control"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_twice_that_of_plain_torch(dtype):
    cases = {
        "o, down": (partial(linear, cut=Leaves(8).inputs(256)), F.linear, ((60, 256), (48, 256))),
        "qkv": (partial(linear, cut=Leaves(8).outputs(128, 64, 64)), F.linear, ((60, 48), (256, 48))),
    }
    for name, (ours, plain, shapes) in cases.items():
        results = []
        for function, kind in ((ours, dtype), (plain, dtype), (plain, torch.float64)):
            x, w = (randn(i, *shape, dtype=dtype).to(kind).requires_grad_() for i, shape in enumerate(shapes))
            y = function(x, w)
            y.backward(randn(9, *y.shape, dtype=dtype).to(kind))
            results.append((y.detach(), x.grad, w.grad))
        for ours_, plain_, exact in zip(*results, strict=True):
            assert_at_most_twice_the_error(ours_, plain_, exact, name)
    h, w, ids = randn(0, 60, 32, dtype=dtype), randn(1, 96, 32, dtype=dtype), randint(2, 96, 60)
    logp = linear_logprob(h, w, ids, leaves=Leaves(8))[0]
    plain, exact = (
        torch.log_softmax(F.linear(h.to(t), w.to(t)).to(s), 1)
        for t, s in ((dtype, torch.float32), (torch.float64, torch.float64))
    )
    assert_at_most_twice_the_error(logp, *(x[torch.arange(60), ids] for x in (plain, exact)), "logprob")
