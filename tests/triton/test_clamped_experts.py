"""Experts of gpt-oss on Triton, interpreted: clamps, biases, transposed matrices, a choice by logits."""

import torch
from zerokl.kernels import expert_columns_triton
from zerokl.kernels.clamped_swiglu import clamped_swiglu, clamped_swiglu_ref
from zerokl.kernels.topk_softmax import topk_of_logits

from tests.helpers import assert_at_most_twice_the_error, randn, total_unequal
from tests.kernels.test_clamped_experts import ALPHA, LIMIT, NAMES, D, E, dtypes, plain, results, weights


@dtypes
def test_everything_is_at_most_twice_as_far_from_fp64_as_plain_torch(dtype):
    runs: list[list[list[torch.Tensor]]] = [[], [], []]
    for seed in (0, 10):
        x, logits = (randn(seed + i, 40, n, dtype=dtype) for i, n in ((5, D), (6, E)))
        w, dy = weights(dtype, seed), randn(seed + 7, 40, D, dtype=dtype)
        runs[0].append(results(x, logits, w, dy, [40]))
        runs[1].append(plain(x, logits, w, dy, dtype))
        runs[2].append(plain(x, logits, w, dy, torch.float64))
    for n, name in enumerate(NAMES):
        ours, torchs, exact = (torch.stack([run[n] for run in who]) for who in runs)
        assert_at_most_twice_the_error(ours, torchs, exact, name)


@dtypes
def test_a_token_knows_no_other_and_gradients_go_on_sequence_after_sequence(dtype):
    lengths, w = [37, 5], weights(dtype)
    x, logits, dy = (randn(i, 42, n, dtype=dtype) for i, n in ((5, D), (6, E), (7, D)))
    *together, _, dgate_up_bias, _, ddown_bias = results(x, logits, w, dy, lengths)
    added = [0.0, 0.0]
    for rows, n in ((slice(0, 37), 37), (slice(37, 42), 5)):
        *alone, _, a, _, b = results(x[rows], logits[rows], w, dy[rows], [n])
        assert total_unequal(alone, [t[rows] for t in together]) == 0
        added = [added[0] + a, added[1] + b]
    # The second sequence has one tile of an expert, so its sum is added at once.
    assert total_unequal(added, [dgate_up_bias, ddown_bias]) == 0


def test_control_a_bias_gradient_whose_tiles_cross_sequences_is_another_sum(monkeypatch):
    x, logits, dy = (randn(i, 42, n) for i, n in ((5, D), (6, E), (7, D)))
    apart, one = (results(x, logits, weights(torch.float32), dy, n)[-1] for n in ([37, 5], [42]))
    assert total_unequal([apart], [one]) > 0
    monkeypatch.setattr(expert_columns_triton, "ROWS", 2)
    other = results(x, logits, weights(torch.float32), dy, [37, 5])[-1]
    assert total_unequal([apart], [other]) > 0


@dtypes
def test_the_clamp_holds_at_its_edge_and_a_pair_knows_no_other(dtype):
    far = torch.finfo(dtype).max
    edges = torch.tensor([LIMIT, LIMIT, 2 * LIMIT, -LIMIT, far, -far, -far, far, float("nan"), 1.0])
    gu = torch.cat([edges, randn(1, 2**12, scale=2.0)]).to(dtype).unsqueeze(0)
    y = clamped_swiglu(gu, ALPHA, LIMIT)
    assert y[0, 4].isnan()
    assert y[0, :4].equal(clamped_swiglu_ref(gu[:, :8], ALPHA, LIMIT)[0])
    assert total_unequal([clamped_swiglu(gu[:, 100:300], ALPHA, LIMIT)], [y[:, 50:150]]) == 0


def test_the_lower_of_equal_experts_is_first_and_a_negative_zero_is_a_zero():
    logits = torch.tensor([[1.0, -0.0, 0.0, 1.0], [-1.0, 0.0, -0.0, -2.0]])
    assert topk_of_logits(logits, 3).tolist() == [[0, 3, 1], [1, 2, 0]]
