"""The distribution that tokens are drawn from: its kept set, its draws, and their reported probabilities."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels.draw import draw, drawn_logprobs
from zerokl.kernels.logprob import (
    chunk_rows,
    linear_logprob,
    log_distribution,
    token_logprobs,
)
from zerokl.kernels.philox import Stream, uniform_range
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.truncation import scaled_logits

from tests.helpers import DTYPES, property_settings, randn, total_unequal


def _uniform(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(uniform_range(n, seed, Stream.SAMPLE))


def slow_kept_set(logits: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    """Top-k with its ties, then the fewest likeliest tokens whose probabilities reach top_p."""
    z = [x / temperature for x in logits]
    kept = list(range(len(z)))
    if 0 < top_k < len(z):
        kth = sorted(z, reverse=True)[top_k - 1]
        kept = [i for i in kept if z[i] >= kth]
    if top_p == 1.0:
        return set(kept)
    total = math.fsum(math.exp(z[i] - max(z)) for i in kept)
    nucleus: list[int] = []
    for i in sorted(kept, key=lambda i: (z[i], i), reverse=True):
        if nucleus and math.fsum(math.exp(z[j] - max(z)) for j in nucleus) >= top_p * total:
            break
        nucleus.append(i)
    return set(nucleus)


@property_settings(150)
@given(
    V=st.integers(2, 60),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([0.013, 0.31, 0.57, 0.93, 0.9991, 1.0]),
    steps=st.sampled_from([2.0, 256.0]),  # 2.0 is so coarse that logits are tied
    seed=st.integers(0, 10_000),
)
def test_kept_set_equals_a_slow_independent_one(V, temperature, top_k, top_p, steps, seed):
    logits = (randn(seed, 3, V, scale=2.0) * steps).round() / steps
    z = scaled_logits(logits, SamplingParams(temperature, top_k, top_p))
    for row, kept in zip(logits.tolist(), torch.isfinite(z), strict=True):
        assert set(kept.nonzero().flatten().tolist()) == slow_kept_set(row, temperature, top_k, top_p)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.7, 10, 0.9), SamplingParams(0.0)])
def test_the_log_distribution_has_the_logprobs_bits_at_every_token(params):
    z = scaled_logits(randn(1, 7, 300, scale=3.0), params)
    table = log_distribution(z)
    for token in range(300):
        ids = torch.full((7,), token)
        assert total_unequal([table[:, token]], [token_logprobs(z, ids)[0]]) == 0
    # control: the same logarithm in one subtraction rounds otherwise
    assert total_unequal([table], [z - z.logsumexp(dim=1, keepdim=True)]) > 0


def test_kept_logits_are_the_scaled_logits_and_all_others_minus_infinity():
    logits = randn(0, 20, 50)
    z = scaled_logits(logits, SamplingParams(0.7, 10, 0.9))
    kept = z > float("-inf")
    assert total_unequal([z[kept]], [(logits / torch.tensor(0.7))[kept]]) == 0
    assert (kept.sum(1) >= 1).all()
    assert (kept.sum(1) <= 10).all()


@pytest.mark.parametrize(
    "sampling_params",
    [
        SamplingParams(),
        SamplingParams(0.6),
        SamplingParams(1.0, 5),
        SamplingParams(1.4, 0, 0.8),
        SamplingParams(1.0, 0, 1.0, 0.1),
        SamplingParams.of(1.2, 9, 0.95, 0.03, {2: 1.5, 9: -1.0}, range(14)),
    ],
)
def test_draws_follow_the_reported_probabilities(sampling_params):
    n, V = 100_000, 16
    z = scaled_logits(randn(3, 1, V, scale=1.5), sampling_params).expand(n, V)
    probability = token_logprobs(z[:V], torch.arange(V))[0].double().exp()
    counts = torch.bincount(draw(z, _uniform(n)), minlength=V).double()
    kept = probability > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - n * probability)[kept] ** 2 / (n * probability[kept])).sum().item()
    freedom = int(kept.sum()) - 1
    limit = freedom + 5 * (2 * freedom) ** 0.5
    assert chi_square < limit
    # control: a temperature that is 5% lower is found
    wrong = torch.bincount(draw(z * 1.05, _uniform(n)), minlength=V).double()
    assert ((wrong - n * probability)[kept] ** 2 / (n * probability[kept])).sum() > limit


def test_draw_never_leaves_the_kept_set_at_the_ends_of_the_interval():
    z = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]]).expand(2, 4)
    assert draw(z, torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)).tolist() == [1, 2]


def test_greedy_takes_the_likeliest_and_reports_temperature_one():
    logits = randn(4, 30, 40)
    z = scaled_logits(logits, SamplingParams(0.0, 5, 0.5))
    assert total_unequal([z], [logits]) == 0
    assert draw(z, _uniform(30), greedy=True).tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sampling_params", [SamplingParams(), SamplingParams(0.7), SamplingParams(0.9, 20, 0.95)]
)
def test_sampler_and_trainer_agree_to_the_bit(sampling_params, dtype):
    """The trainer's path (autograd, all rows) beside the sampler's (no autograd, one row at a time)."""
    h, w = randn(5, 70, 48, dtype=dtype), randn(6, 101, 48, dtype=dtype, scale=0.3)
    with torch.no_grad():
        ids = draw(scaled_logits(h @ w.t(), SamplingParams(1.0, 1)), _uniform(70))
        sampler = torch.cat(
            [linear_logprob(h[i : i + 1], w, ids[i : i + 1], sampling_params)[0] for i in range(70)]
        )
    trainer = linear_logprob(h.requires_grad_(), w.requires_grad_(), ids, sampling_params)[0]
    assert total_unequal([trainer], [sampler]) == 0
    assert torch.isfinite(sampler).all()


def test_truncated_probabilities_sum_to_one():
    h, w = randn(7, 1, 32).expand(60, 32), randn(8, 60, 32, scale=0.3)
    logp = linear_logprob(h, w, torch.arange(60), SamplingParams(0.8, 12, 0.9))[0]
    assert math.fsum(logp.double().exp().tolist()) == pytest.approx(1.0, abs=60 * 2.0**-24)


@pytest.mark.parametrize(
    ("sampling_params", "message"),
    [
        (SamplingParams(-1.0), r"temperature \(-1.0\)"),
        (SamplingParams(float("nan")), r"temperature \(nan\)"),
        (SamplingParams(float("inf")), r"temperature \(inf\)"),
        (SamplingParams(1.0, -1), r"top_k \(-1\)"),
        (SamplingParams(1.0, 0, 0.0), r"top_p \(0.0\)"),
        (SamplingParams(1.0, 0, 1.1), r"top_p \(1.1\)"),
    ],
)
def test_distribution_out_of_range_is_refused(sampling_params, message):
    h, w, ids = torch.zeros(1, 4), torch.zeros(3, 4), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        linear_logprob(h, w, ids, sampling_params)


@pytest.mark.parametrize("greedy", [False, True])
@property_settings(20)
@given(T=st.integers(1, 70), V=st.integers(1, 300), seed=st.integers(0, 99))
def test_a_drawn_token_has_the_logprob_that_is_scored(greedy, T, V, seed):
    z, u = scaled_logits(randn(seed, T, V, scale=3.0), SamplingParams(0.7)), _uniform(T, seed)
    ids, logp = drawn_logprobs(z, u, greedy)
    assert ids.tolist() == draw(z, u, greedy).tolist()
    assert total_unequal([logp], [token_logprobs(z, ids)[0]]) == 0


def test_logits_that_are_nan_draw_a_token_with_a_nan_logprob():
    z, u = randn(0, 3, 20), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    clean = drawn_logprobs(z, u)
    z[1] = float("nan")
    ids, logp = drawn_logprobs(z, u)
    assert int(ids.max()) < 20
    assert logp[1].isnan()
    assert (ids[::2].tolist(), logp[::2].tolist()) == (clean[0][::2].tolist(), clean[1][::2].tolist())


def test_a_gpu_holds_rows_enough_to_be_kept_busy_and_a_cpu_few():
    assert [chunk_rows(151936, torch.device(name)) for name in ("cpu", "cuda")] == [64, 832]
    assert chunk_rows(1 << 30, torch.device("cuda")) == 64
