"""Accuracy against fp64: the error of each operation is at most twice that of plain torch in the same dtype.

Outputs and gradients are judged. In fp64 every operation passes gradcheck.
"""

import pytest
import torch
import torch.nn.functional as F
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.rope import rope_frequencies, rope_table
from zerokl.kernels.rope_scaling import llama3_frequencies
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.truncation import scaled_logits

from tests.helpers import DTYPES, assert_at_most_twice_the_error, randn, threads, total_unequal
from tests.law.accuracy import IDS, OPS, assert_accurate, inputs

# Shapes small enough for gradcheck's finite differences, and not multiples of 16 where kernels pad.
SMALL = {
    "linear": ((5, 7), (3, 7)),
    "linear with bias": ((5, 7), (3, 7), (3,)),
    "rms_norm": ((5, 7), (7,)),
    "add_rms_norm": ((5, 7), (5, 7), (7,)),
    "value_head": ((5, 7), (7,)),
    "qk_norm": ((3, 3, 5), (5,), (5,)),
    "qk_norm plus one": ((3, 3, 5), (5,), (5,)),
    "softcap": ((5, 7),),
    "silu_mul": ((5, 14),),
    "sigmoid_router": ((5, 12),),
    "add_shared": ((5, 7), (5, 7), (5, 1)),
    "gelu_mul": ((5, 14),),
    "rms_norm plus one": ((5, 7), (7,)),
    "scale": ((5, 7),),
    "share_key": ((5, 7),),
    "rope": ((4, 2, 32),),
    "embedding": ((10, 3),),
    "attention": ((6, 2, 16), (6, 1, 16), (6, 1, 16)),
    "experts": ((5, 6), (5, 4), (4 * 6, 6), (4 * 6, 3)),
    "experts without renormalisation": ((5, 6), (5, 4), (4 * 6, 6), (4 * 6, 3)),
    "linear_logprob": ((5, 7), (9, 7)),
    "linear_logprob at a temperature": ((5, 7), (9, 7)),
    "linear_logprob with a bias": ((5, 7), (9, 7)),
    "linear_logprob with a cap": ((5, 7), (9, 7)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_error_is_at_most_twice_that_of_plain_torch(name, dtype):
    assert_accurate(OPS[name], dtype)


@pytest.mark.parametrize("name", OPS)
def test_gradcheck_in_fp64(name):
    assert torch.autograd.gradcheck(OPS[name].ours, inputs(SMALL[name], torch.float64, 3))


@pytest.mark.parametrize(
    "sampling_params",
    [
        SamplingParams(0.8, 6, 0.9),
        SamplingParams(0.8, 0, 1.0, 0.1),
        SamplingParams.of(0.8, 6, 0.9, 0.01, {1: 0.5, 4: -0.5}, (0, 1, 2, 4, 5, 7, 8)),
    ],
)
def test_gradcheck_of_truncated_logprobs(sampling_params):
    h, w = inputs(((6, 7), (9, 7)), torch.float64, 4)
    # The likeliest token is always kept.
    ids = scaled_logits(F.linear(h, w), sampling_params).argmax(1)
    assert torch.autograd.gradcheck(lambda h, w: linear_logprob(h, w, ids, sampling_params)[0], (h, w))


def _entropy(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=F.linear(h, w) / 0.7).entropy()


def test_error_of_the_entropy_is_at_most_twice_that_of_plain_torch():
    h, w = randn(0, 300, 16), randn(1, 50, 16)
    ours = linear_logprob(h, w, IDS.repeat(2) % 50, SamplingParams(0.7))[1]
    assert_at_most_twice_the_error(ours, _entropy(h, w), _entropy(h.double(), w.double()), "entropy")


def test_llama3_frequencies_keep_short_wavelengths_and_stretch_long_ones():
    base = rope_frequencies(128, 500_000.0)
    scaled = llama3_frequencies(base, 8.0, 1.0, 4.0, 8192)
    ratio = [b / s for b, s in zip(base, scaled, strict=True)]
    assert ratio[0] == 1.0
    assert ratio[-1] == 8.0
    assert ratio == sorted(ratio)
    assert any(1.0 < r < 8.0 for r in ratio)


def test_rope_table_is_the_fp64_table_rounded_once():
    cos, sin = rope_table(rope_frequencies(64, 1e6), 3000, torch.float32)
    frequency = 1e6 ** (-torch.arange(32, dtype=torch.float64) / 32)
    angle = torch.arange(3000, dtype=torch.float64).unsqueeze(1) * frequency
    # Half a unit in the last place of fp32 below 1, and the rounding of the angle in fp64.
    half_unit = 2.0**-25 + 1e-12
    assert (cos.double() - angle.cos()).abs().max() <= half_unit
    assert (sin.double() - angle.sin()).abs().max() <= half_unit


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_table_does_not_depend_on_its_length_or_on_threads(dtype):
    frequencies = rope_frequencies(64, 1e6)
    table = rope_table(frequencies, 3000, dtype)
    assert total_unequal([x[:777] for x in table], rope_table(frequencies, 777, dtype)) == 0
    with threads(2):
        assert total_unequal(table, rope_table(frequencies, 3000, dtype)) == 0
