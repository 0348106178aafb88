"""Experts of gpt-oss on Triton, interpreted: clamps, biases, transposed matrices, a choice by logits.

Where no sum rounds, and with one exp, they have the bits of the reference of a CPU. Otherwise the order of
the sums differs, and fp64 judges.
"""

import numpy as np
import pytest
import torch
from zerokl.kernels import clamped_swiglu as gate
from zerokl.kernels import combine_experts, combine_experts_triton, expert_rows, grouped_linear
from zerokl.kernels.clamped_swiglu_triton import clamped_swiglu_bwd, clamped_swiglu_fwd
from zerokl.kernels.expert_columns_triton import ROWS, add_expert_columns
from zerokl.kernels.expert_rows_triton import sort_slots
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass
from zerokl.kernels.topk_softmax import topk_of_logits

from tests.helpers import DTYPES, assert_at_most_twice_the_error, randint, randn, total_unequal
from tests.kernels.test_clamped_experts import (
    ALPHA,
    INNER,
    LIMIT,
    NAMES,
    D,
    E,
    K,
    dtypes,
    plain,
    results,
    weights,
)


def one_dtype(chosen: torch.dtype) -> pytest.MarkDecorator:
    """Every dtype; a quick run takes the chosen one, because a mixture takes the interpreter seconds."""
    params = [pytest.param(dtype, marks=[pytest.mark.full] * (dtype != chosen)) for dtype in DTYPES]
    return pytest.mark.parametrize("dtype", params, ids=str)


@dtypes
def test_the_gate_and_its_gradient_have_the_references_bits_with_one_exp(dtype, monkeypatch):
    """The interpreter's exp is numpy's. At the limit, and far from it, too."""
    far = torch.finfo(dtype).max
    edges = torch.tensor([LIMIT, LIMIT, 2 * LIMIT, -LIMIT, -far, far, far, -far, -0.0, 0.0])
    gu = torch.cat([edges.repeat(2, 1), randn(1, 2, 2200, scale=2.0)], 1).to(dtype)
    dy = randn(2, 2, 1105, dtype=dtype)
    ours = [clamped_swiglu_fwd(gu, ALPHA, LIMIT), clamped_swiglu_bwd(dy, gu, ALPHA, LIMIT)]
    torchs = gate.clamped_swiglu_bwd_ref(dy, gu, ALPHA, LIMIT)
    monkeypatch.setattr(gate.torch, "exp", lambda x: torch.from_numpy(np.exp(x.numpy())))
    reference = [
        gate.clamped_swiglu_ref(gu, ALPHA, LIMIT),
        gate.clamped_swiglu_bwd_ref(dy, gu, ALPHA, LIMIT),
    ]
    assert total_unequal(ours, reference) == 0
    if dtype == torch.float32:
        assert total_unequal([torchs], reference[1:]) > 0, "control: torch's exp has other bits"


@dtypes
def test_a_nan_stays_one_through_the_clamps(dtype):
    gu = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan, 1.0, 1.0]], dtype=dtype)
    dy = torch.ones(1, 3, dtype=dtype)
    assert clamped_swiglu_fwd(gu, ALPHA, LIMIT).isnan().tolist() == [[True, True, False]]
    nan = gate.clamped_swiglu_bwd_ref(dy, gu, ALPHA, LIMIT).isnan()
    assert clamped_swiglu_bwd(dy, gu, ALPHA, LIMIT).isnan().equal(nan)


def whole(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers from -2 to 2."""
    return (randint(seed, 5, *shape) - 2).to(dtype)


def products(dtype: torch.dtype, lengths: list[int]) -> list[torch.Tensor]:
    """Both products, by token and slot, and the gradients of all that goes into them. No sum rounds."""
    T = sum(lengths)
    x, h_slots, dgu, dy = (
        whole(i, *shape, dtype=dtype)
        for i, shape in enumerate(((T, D), (T * K, INNER), (T * K, 2 * INNER), (T, D)))
    )
    w = [whole(9 + i, *t.shape, dtype=dtype) for i, t in enumerate(weights(dtype))]
    ids, q = randn(5, T, E).argsort(1)[:, :K].contiguous(), whole(6, T, K) / 4
    rows = expert_rows.expert_rows(ids, E, x)
    places = rows.places.flatten().long()
    R = len(rows.tokens) if isinstance(rows, expert_rows.ExpertRows) else T * K
    h, dgu_rows = (torch.zeros(R, t.shape[1], dtype=dtype) for t in (h_slots, dgu))
    h[places], dgu_rows[places] = h_slots, dgu
    leaves = x, h, q, *w
    for leaf in leaves:
        leaf.requires_grad_()
    buffers = {t: GradBuffer.like(t) for t in w}
    in_pass = Pass(token_blocks(lengths), buffers)
    gu = grouped_linear.grouped_linear(x, w[0], rows, in_pass, w[1])
    y = combine_experts.combine_experts(h, w[2], q, rows, in_pass, w[3])
    gu.backward(dgu_rows)
    y.backward(dy)
    by_slot = [gu.detach()[places], y.detach(), x.grad, h.grad[places], q.grad]
    return by_slot + [buffers[t].zeroed([0])[0] for t in w]


@dtypes
def test_products_with_biases_have_the_references_bits_where_no_sum_rounds(dtype, monkeypatch):
    ours = products(dtype, [9, 4])
    with monkeypatch.context() as patch:
        patch.setattr(combine_experts_triton, "add_bias_dots", lambda *_: None)
        without = products(dtype, [9, 4])
    for module in (combine_experts, expert_rows, grouped_linear):
        monkeypatch.setattr(module, "on_triton", lambda _: False)
    reference = products(dtype, [9, 4])
    assert [total_unequal([a], [b]) for a, b in zip(ours, reference, strict=True)] == [0] * 9
    different = [total_unequal([a], [b]) > 0 for a, b in zip(without, reference, strict=True)]
    assert different == [i == 4 for i in range(9)], "control: dq without what the biases add"


@one_dtype(torch.bfloat16)
def test_everything_is_at_most_twice_as_far_from_fp64_as_plain_torch(dtype):
    runs: list[list[list[torch.Tensor]]] = [[], [], []]
    for seed in (0, 10):
        x, logits = (randn(seed + i, 16, n, dtype=dtype) for i, n in ((5, D), (6, E)))
        w, dy = weights(dtype, seed), randn(seed + 7, 16, D, dtype=dtype)
        runs[0].append(results(x, logits, w, dy, [16]))
        runs[1].append(plain(x, logits, w, dy, dtype))
        runs[2].append(plain(x, logits, w, dy, torch.float64))
    for n, name in enumerate(NAMES):
        ours, torchs, exact = (torch.stack([run[n] for run in who]) for who in runs)
        assert_at_most_twice_the_error(ours, torchs, exact, name)


@one_dtype(torch.float32)
def test_a_token_knows_no_other_and_gradients_go_on_sequence_after_sequence(dtype):
    lengths, w = [13, 3], weights(dtype)
    x, logits, dy = (randn(i, 16, n, dtype=dtype) for i, n in ((5, D), (6, E), (7, D)))
    *together, _, dgate_up_bias, _, ddown_bias = results(x, logits, w, dy, lengths)
    added = [0.0, 0.0]
    for rows, n in ((slice(0, 13), 13), (slice(13, 16), 3)):
        *alone, _, a, _, b = results(x[rows], logits[rows], w, dy[rows], [n])
        assert total_unequal(alone[:3], [t[rows] for t in together[:3]]) == 0
        added = [added[0] + a, added[1] + b]
    # The second sequence has one tile of an expert, so its sum is added at once.
    assert total_unequal(added, [dgate_up_bias, ddown_bias]) == 0


def bias_gradient(dy: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Of tokens that all have experts 0 and 2 of 3."""
    rows, buffer = sort_slots(torch.tensor([[0, 2]]).repeat(sum(lengths), 1), 3), GradBuffer.like(dy[:3])
    add_expert_columns(buffer, torch.cat([dy, dy]), rows, token_blocks(lengths))
    return buffer.zeroed([0])[0]


def test_a_bias_gradient_is_summed_in_tiles_of_a_sequence_and_a_control_across_them_is_another_sum():
    lengths, dy = [ROWS + 9, 5], randn(0, ROWS + 14, 130)
    sums, total = bias_gradient(dy, lengths), torch.zeros(130)
    for start, end in ((0, ROWS), (ROWS, ROWS + 9), (ROWS + 9, ROWS + 14)):
        total += bias_gradient(dy[start:end], [end - start])[0]
    assert total_unequal([sums], [torch.stack([total, torch.zeros(130), total])]) == 0
    assert total_unequal([sums], [bias_gradient(dy, [sum(lengths)])]) > 0


def test_the_lower_of_equal_experts_is_first_and_a_negative_zero_is_a_zero():
    logits = torch.tensor([[1.0, -0.0, 0.0, 1.0], [-1.0, 0.0, -0.0, -2.0]])
    assert topk_of_logits(logits, 3).tolist() == [[0, 3, 1], [1, 2, 0]]
