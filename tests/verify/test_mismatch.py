"""The mismatch metrics equal a slow independent implementation; missing data is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.verify.mismatch import mismatch_metrics

from tests.helpers import property_settings


def percentile(values: list[float], q: float) -> float:
    """Linear interpolation between order statistics."""
    ordered, position = sorted(values), (len(values) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def slow_metrics(trainer: np.ndarray, sampler: np.ndarray, lengths: list[int]) -> dict[str, float]:
    d = [float(t) - float(s) for t, s in zip(trainer, sampler, strict=True)]
    r = [math.exp(x) for x in d]
    n, sequences, k3_sequences, start = len(d), [], [], 0
    for length in lengths:
        sequences.append(math.exp(sum(d[start : start + length])))
        k3_sequences.append(sum(math.exp(x) - 1 - x for x in d[start : start + length]))
        start += length
    return {
        "k1": -sum(d) / n,
        "k2": sum(x * x for x in d) / n / 2,
        "k3": sum(x - 1 - y for x, y in zip(r, d, strict=True)) / n,
        "k3_sequence": sum(k3_sequences) / len(k3_sequences),
        "mean_abs": sum(map(abs, d)) / n,
        "max_abs": max(map(abs, d)),
        "frac_outside": 0.0,
        "frac_infinite": 0.0,
        "frac_equal": sum(t.tobytes() == s.tobytes() for t, s in zip(trainer, sampler, strict=True)) / n,
        "ratio_min": min(r),
        "ratio_p1": percentile(r, 1),
        "ratio_p50": percentile(r, 50),
        "ratio_p99": percentile(r, 99),
        "ratio_max": max(r),
        "ess": sum(r) ** 2 / (n * sum(x * x for x in r)),
        "chi2": sum((x - 1) ** 2 for x in r) / n,
        "sequence_ratio_min": min(sequences),
        "sequence_ratio_max": max(sequences),
    }


def _logprobs(lengths: list[int], noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sampler = -rng.exponential(2.0, sum(lengths)).astype(np.float32)
    moved = rng.random(len(sampler)) < 0.7
    noisy = sampler + noise * rng.standard_normal(len(sampler))
    return np.where(moved, noisy, sampler).astype(np.float32), sampler


@property_settings(60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    noise=st.sampled_from([1e-6, 0.01, 0.5]),
    seed=st.integers(0, 1000),
)
def test_metrics_equal_a_slow_independent_implementation(lengths, noise, seed):
    trainer, sampler = _logprobs(lengths, noise, seed)
    metrics = mismatch_metrics(trainer, sampler, lengths, prefix="")
    expected = slow_metrics(trainer, sampler, lengths)
    assert metrics.keys() == expected.keys()
    # The fp64 sums have another order.
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-14), name


def test_equal_bits_give_exact_zeros_and_ones():
    _, sampler = _logprobs([5, 9], 0.0, 0)
    metrics = mismatch_metrics(sampler.copy(), sampler, [5, 9])
    zeros = {"k1", "k2", "k3", "k3_sequence", "mean_abs", "max_abs", "chi2", "frac_outside", "frac_infinite"}
    assert metrics == {name: 0.0 if name.removeprefix("mismatch/") in zeros else 1.0 for name in metrics}
    assert math.copysign(1.0, metrics["mismatch/k1"]) == 1.0


def test_metrics_do_not_depend_on_the_order_of_the_tokens():
    trainer, sampler = _logprobs([200], 0.1, 1)
    order = np.random.default_rng(2).permutation(200)
    shuffled = mismatch_metrics(trainer[order], sampler[order], [200])
    token_metrics = {item for item in shuffled.items() if "sequence" not in item[0]}
    assert mismatch_metrics(trainer, sampler, [200]).items() >= token_metrics


def test_one_unequal_bit_is_seen():
    _, sampler = _logprobs([50], 0.0, 3)
    trainer = sampler.copy()
    trainer[17] = np.nextafter(trainer[17], np.float32(0))
    metrics = mismatch_metrics(trainer, sampler, [50], prefix="")
    assert metrics["frac_equal"] == 49 / 50
    assert metrics["max_abs"] == abs(float(trainer[17]) - float(sampler[17]))
    assert metrics["k3"] > 0


def test_negative_zero_is_not_equal_to_zero():
    metrics = mismatch_metrics(np.array([-0.0], np.float32), np.array([0.0], np.float32), [1], prefix="")
    assert metrics["frac_equal"] == 0.0
    assert metrics["max_abs"] == 0.0


def test_a_token_impossible_for_both_is_equal():
    impossible = np.array([-np.inf, -1.0], np.float32)
    metrics = mismatch_metrics(impossible, impossible.copy(), [2], prefix="")
    assert (metrics["k3"], metrics["frac_outside"], metrics["frac_infinite"]) == (0.0, 0.0, 0.0)


def test_tokens_outside_are_counted_and_the_rest_is_estimated():
    """The ratio of a token outside is 0, which the effective sample size takes; its log ratio has no mean."""
    trainer = np.array([-np.inf, -1.0, -2.0, -1.5], np.float32)
    sampler = np.array([-2.0, -1.5, -2.0, -np.inf], np.float32)
    metrics = mismatch_metrics(trainer, sampler, [2, 2], prefix="")
    rest = mismatch_metrics(trainer[1:3], sampler[1:3], [2], prefix="")
    for name in ("k1", "k2", "k3", "max_abs"):
        assert metrics[name] == rest[name]
    assert (metrics["frac_outside"], metrics["frac_infinite"]) == (0.25, 0.25)
    assert (metrics["ratio_min"], metrics["ratio_max"]) == (0.0, math.exp(0.5))
    ratios = [0.0, math.exp(0.5), 1.0]
    assert metrics["ess"] == pytest.approx(sum(ratios) ** 2 / (3 * sum(r * r for r in ratios)))
    assert (metrics["sequence_ratio_min"], metrics["sequence_ratio_max"]) == (0.0, 0.0)


@pytest.mark.parametrize("logp", [-np.inf, 0.0])
def test_where_every_ratio_is_0_or_infinite_nothing_is_estimated(logp):
    trainer, sampler = np.full(3, logp, np.float32), np.full(3, -np.inf if logp == 0.0 else 0.0, np.float32)
    metrics = mismatch_metrics(trainer, sampler, [1, 2], prefix="")
    assert math.isnan(metrics["k3"])
    assert metrics["frac_outside"] + metrics["frac_infinite"] == 1.0


_LOGPROBS = st.sampled_from([0.0, -0.0, -1e-7, -0.5, -2.0, -200.0, -700.0, -1e4, -3e38, -np.inf])


@property_settings(200)
@given(pairs=st.lists(st.tuples(_LOGPROBS, _LOGPROBS), min_size=1, max_size=12), cut=st.integers(1, 12))
@pytest.mark.filterwarnings("error")
def test_no_logprobs_give_infinite_metrics_or_a_warning(pairs, cut):
    trainer, sampler = (np.array(x, np.float32) for x in zip(*pairs, strict=True))
    cut = min(cut, len(pairs))
    lengths = [cut, len(pairs) - cut] if cut < len(pairs) else [cut]
    metrics = mismatch_metrics(trainer, sampler, lengths, prefix="")
    assert not any(math.isinf(x) for x in metrics.values())
    left_out = metrics["frac_outside"] + metrics["frac_infinite"]
    assert math.isnan(metrics["k3"]) == (left_out == 1.0)


@pytest.mark.parametrize(
    ("trainer", "sampler", "lengths", "message"),
    [
        ([-1.0, math.nan], [-1.0, -1.0], [2], "trainer logprob of token 1 is NaN"),
        ([-1.0, -1.0], [math.nan, -1.0], [2], "sampler logprob of token 0 is NaN"),
        ([-1.0], [-1.0, -1.0], [2], r"trainer \(1,\), sampler \(2,\) must be \[2\]"),
        ([-1.0, -1.0], [-1.0, -1.0], [1], r"must be \[1\]"),
        ([], [], [], "not 0"),
    ],
)
def test_missing_data_is_refused(trainer, sampler, lengths, message):
    with pytest.raises(ValueError, match=message):
        mismatch_metrics(np.array(trainer, np.float32), np.array(sampler, np.float32), lengths)
