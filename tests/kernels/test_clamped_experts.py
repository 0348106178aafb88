"""Experts of gpt-oss: clamped SwiGLU, transposed matrices with biases, and a choice by logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels.clamped_swiglu import clamped_swiglu
from zerokl.kernels.combine_experts import combine_experts
from zerokl.kernels.expert_rows import ExpertRows, expert_rows
from zerokl.kernels.given_softmax import given_softmax
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.grouped_linear import add_grouped_columns, grouped_linear
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass
from zerokl.kernels.topk_softmax import topk_of_groups, topk_of_logits, topk_softmax

from tests.helpers import (
    DTYPES,
    assert_at_most_twice_the_error,
    property_settings,
    randint,
    randn,
    total_unequal,
)

ALPHA, LIMIT = 1.702, 2.0
E, D, INNER, K = 6, 32, 24, 2
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def weights(dtype: torch.dtype, seed: int = 0) -> Weights:
    """gate_up [E, D, 2 INNER] and down [E, INNER, D], each before its bias [E, .]."""
    shapes = (E, D, 2 * INNER), (E, 2 * INNER), (E, INNER, D), (E, D)
    scales = D**-0.5, 1.0, INNER**-0.5, 1.0
    parts = enumerate(zip(shapes, scales, strict=True))
    return tuple(randn(seed + i, *shape, dtype=dtype, scale=scale) for i, (shape, scale) in parts)


def results(x: torch.Tensor, logits: torch.Tensor, w: Weights, dy: torch.Tensor, lengths: list[int]):
    """y, and the gradients of x, of the logits, and of the weights as their buffers have them."""
    x, logits, *w = (t.detach().clone().requires_grad_() for t in (x, logits, *w))
    buffers = {t: GradBuffer.like(t) for t in w}
    in_pass = Pass(token_blocks(lengths), buffers)
    ids = topk_of_logits(logits, K)
    rows = expert_rows(ids, E, x)
    h = clamped_swiglu(grouped_linear(x, w[0], rows, in_pass, w[1]), ALPHA, LIMIT)
    y = combine_experts(h, w[2], given_softmax(logits, ids, True), rows, in_pass, w[3])
    y.backward(dy)
    return [y.detach(), x.grad, logits.grad, *(buffers[t].zeroed([0])[0] for t in w)]


def plain(
    x: torch.Tensor, logits: torch.Tensor, w: Weights, dy: torch.Tensor, dtype: torch.dtype, **other: Any
):
    """The same by plain torch, as transformers has it. other: a planted fault."""
    leaves = x, logits, *w = [t.detach().to(dtype).requires_grad_() for t in (x, logits, *w)]
    top, ids = logits.topk(K, -1)
    q = top.softmax(-1) if not other.get("softmax_first") else logits.softmax(-1).gather(1, ids)
    y, limit = torch.zeros_like(x), other.get("limit", LIMIT)
    for slot in range(K):
        gate_up = (x.unsqueeze(1) @ w[0][ids[:, slot]]).squeeze(1) + w[1][ids[:, slot]] * other.get("bias", 1)
        gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
        h = (up + 1) * (gate * torch.sigmoid(gate * ALPHA))
        out = (h.unsqueeze(1) @ w[2][ids[:, slot]]).squeeze(1) + w[3][ids[:, slot]]
        y = y + out * q[:, slot : slot + 1]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]


NAMES = "y", "dx", "dlogits", "dgate_up", "dgate_up_bias", "ddown", "ddown_bias"
FAULTS: dict[str, dict[str, Any]] = {
    "the clamp left out": {"limit": torch.inf},
    "the softmax before the choice": {"softmax_first": True},
    "a bias left out": {"bias": 0},
}


@dtypes
def test_everything_is_at_most_twice_as_far_from_fp64_as_plain_torch_and_faults_are_seen(dtype):
    runs: list[list[list[torch.Tensor]]] = [[], [], []]
    for seed in (0, 10, 20):
        x, logits = (randn(seed + i, 60, n, dtype=dtype) for i, n in ((5, D), (6, E)))
        w = weights(dtype, seed)
        dy = randn(seed + 7, 60, D, dtype=dtype)
        runs[0].append(results(x, logits, w, dy, [60]))
        runs[1].append(plain(x, logits, w, dy, dtype))
        runs[2].append(plain(x, logits, w, dy, torch.float64))
    for n, name in enumerate(NAMES):
        ours, torchs, exact = (torch.stack([run[n] for run in who]) for who in runs)
        assert_at_most_twice_the_error(ours, torchs, exact, name)
    for other in FAULTS.values():
        wrong = plain(x, logits, w, dy, torch.float64, **other)[0]
        with pytest.raises(AssertionError, match="y"):
            assert_at_most_twice_the_error(wrong, runs[1][-1][0], runs[2][-1][0], "y")


@dtypes
@property_settings(8)
@given(lengths=st.lists(st.integers(1, 140), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_a_token_knows_no_other_and_gradients_are_sums_over_sequences(dtype, lengths, seed):
    T, w = sum(lengths), weights(dtype, seed)
    x, logits, dy = (randn(seed + i, T, n, dtype=dtype) for i, n in ((5, D), (6, E), (7, D)))
    y, dx, dlogits, *together = results(x, logits, w, dy, lengths)
    added, start = [torch.zeros_like(t) for t in together], 0
    for n in lengths:
        rows = slice(start, start + n)
        *alone, a, b, c, d = results(x[rows], logits[rows], w, dy[rows], [n])
        assert total_unequal(alone, [t[rows] for t in (y, dx, dlogits)]) == 0
        added, start = [s + t for s, t in zip(added, (a, b, c, d), strict=True)], start + n
    one = randint(seed, T, 1)
    alone = results(x[one], logits[one], w, dy[one], [1])[0]
    assert total_unequal([alone], [y[one]]) == 0
    if max(lengths) <= 128:  # each sequence is one token block, whose sum is added to those before
        # The biases' blocks are summed first, and then added; a matrix goes on in the sum so far.
        assert total_unequal([added[1], added[3]], [together[1], together[3]]) == 0


def test_two_shards_in_one_pass_have_the_sums_of_two_passes():
    """Their buffers lie in one memory of all weights, as the trainer's do."""
    w, ids = weights(torch.float32), randint(0, E, 30, 1)
    dy, rows, memory = randn(1, 30, D), ExpertRows(ids, E), torch.zeros(2, E * D + 7)
    both = memory[:, : E * D].unflatten(1, (E, D))
    dy_rows = dy[rows.tokens]
    add_grouped_columns(GradBuffer(both), dy_rows, rows, token_blocks([10, 20], [0, 1]))
    for shard, (lengths, part) in enumerate((([10], slice(0, 10)), ([20], slice(10, 30)))):
        part_rows, alone = ExpertRows(ids[part], E), GradBuffer.like(w[3])
        add_grouped_columns(alone, dy[part][part_rows.tokens], part_rows, token_blocks(lengths))
        assert total_unequal([both[shard]], [alone.zeroed([0])[0]]) == 0


def test_gradcheck_in_fp64():
    w = [t.requires_grad_() for t in weights(torch.float64)]
    x, logits = (randn(i, 3, n, dtype=torch.float64).requires_grad_() for i, n in ((5, D), (6, E)))
    ids = topk_of_logits(logits, K)
    rows = ExpertRows(ids, E)

    def mixture(x, logits, a, b, c, d):
        h = clamped_swiglu(grouped_linear(x, a, rows, b=b), ALPHA, LIMIT)
        return combine_experts(h, c, given_softmax(logits, ids, True), rows, b=d)

    assert torch.autograd.gradcheck(mixture, [x, logits, *w], fast_mode=True)


@dtypes
def test_the_clamp_holds_at_its_edge_and_beyond(dtype):
    """As torch's clamp: of the limit itself the gradient goes through. Nothing overflows."""
    far = torch.finfo(dtype).max
    g = torch.tensor([LIMIT, 2 * LIMIT, far, -far, -LIMIT, 0.5], dtype=dtype)
    u = torch.tensor([LIMIT, -LIMIT, -far, far, 2 * LIMIT, -0.5], dtype=dtype)
    gu = torch.stack([g, u], 1).flatten().unsqueeze(0).requires_grad_()
    y = clamped_swiglu(gu, ALPHA, LIMIT)
    y.sum().backward()
    wide = gu.detach().double().requires_grad_()
    gate, up = wide[:, ::2].clamp(max=LIMIT), wide[:, 1::2].clamp(-LIMIT, LIMIT)
    expected = (up + 1) * (gate * torch.sigmoid(gate * ALPHA))
    expected.sum().backward()
    rounded = lambda x: x.detach().to(dtype).double()  # noqa: E731
    step = torch.finfo(dtype).eps
    assert torch.allclose(y.double(), rounded(expected), rtol=2 * step, atol=1e-30)
    assert torch.allclose(gu.grad.double(), rounded(wide.grad), rtol=4 * step, atol=4 * step)
    assert ((gu.grad == 0) == (wide.grad == 0)).all()


@property_settings(20)
@given(seed=st.integers(0, 999), few=st.booleans())
def test_the_choice_is_of_the_largest_logits_and_of_equal_ones_the_lower_id(seed, few):
    logits = randn(seed, 20, 8)
    logits = logits.round() if few else logits
    ids = topk_of_logits(logits, 3)
    for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        assert chosen == sorted(range(8), key=lambda e: (-row[e], e))[:3]
    assert total_unequal([ids], [topk_softmax(logits, 3, True)[1]]) == 0


@property_settings(20)
@given(seed=st.integers(0, 999), few=st.booleans(), groups=st.sampled_from([1, 2, 4]), data=st.data())
def test_the_choice_is_of_the_groups_with_the_largest_logits(seed, few, groups, data):
    top = data.draw(st.integers(1, groups))
    logits = randn(seed, 20, 8)
    logits = logits.round() if few else logits
    size, k = 8 // groups, min(3, top * (8 // groups))
    for row, chosen in zip(logits.tolist(), topk_of_groups(logits, k, groups, top).tolist(), strict=True):
        best = sorted(range(groups), key=lambda g: (-max(row[g * size : (g + 1) * size]), g))[:top]
        inside = [e for e in range(8) if e // size in best]
        assert chosen == sorted(inside, key=lambda e: (-row[e], e))[:k]


def test_control_experts_of_all_groups_are_others():
    logits = randn(0, 50, 8)
    assert total_unequal([topk_of_groups(logits, 3, 4, 2)], [topk_of_logits(logits, 3)]) > 0


def test_control_a_choice_by_probability_differs_where_logits_do_and_probabilities_do_not():
    logits = torch.tensor([[0.0, -200.0, -150.0]])
    assert topk_of_logits(logits, 2).tolist() == [[0, 2]]
    assert topk_softmax(logits, 2, True)[1].tolist() == [[0, 1]]


def test_a_logit_that_is_nan_gives_nothing_finite():
    logits = torch.tensor([[0.0, torch.nan, 1.0]])
    assert given_softmax(logits, topk_of_logits(logits, 2), True).isnan().all()


X, ROWS = torch.zeros(2, D), ExpertRows(torch.tensor([[0, 1], [2, 1]]), E)
W, B, DOWN, DOWN_B = weights(torch.float32)
REFUSED: dict[str, Callable[[], object]] = {
    r"grouped_linear: x \(2, 32\) must be \[., K\], and w \(6, 24, 32\) \[6, K, N\]": lambda: grouped_linear(
        X, DOWN, ROWS, b=DOWN_B
    ),
    r"grouped_linear: b \(6, 32\) must be \(6, 48\), as w": lambda: grouped_linear(X, W, ROWS, b=DOWN_B),
    r"clamped_swiglu: gu \(2, 3\) must be \[T, 2 I\]": lambda: clamped_swiglu(torch.zeros(2, 3), 1.0, 1.0),
    r"combine_experts: b\.dtype \(torch.float64\) must equal": lambda: combine_experts(
        X[:, :INNER], DOWN, torch.zeros(2, K), ROWS, b=DOWN_B.double()
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
