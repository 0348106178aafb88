"""The draw on Triton, interpreted: the tokens and logprobs of the functions that draw row by row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels import draw_triton
from zerokl.kernels.draw import _invert, draw_tokens
from zerokl.kernels.logprob_triton import logprob_fwd
from zerokl.kernels.philox import Stream, uniform_range
from zerokl.kernels.sampling_params import SamplingParams

from tests.helpers import DTYPES, property_settings, randn, total_unequal


def _logits(n: int, V: int, seed: int, dtype: torch.dtype, scale: float = 3.0) -> torch.Tensor:
    logits = randn(seed, n, V, scale=scale)
    logits[:, ::3] = float("-inf")
    return logits.to(dtype)


def by_rows(logits: torch.Tensor, u: torch.Tensor, temperature: float) -> list[torch.Tensor]:
    """ids and logp by one program a row, with numpy's exp in the draw, as the interpreter has it."""
    z = (logits.float() / torch.tensor(temperature)).numpy()
    e = torch.from_numpy(np.exp(z - z.max(axis=1, keepdims=True)))
    ids = _invert(e, u)
    return [ids, logprob_fwd(logits.float(), ids, temperature)[0]]


@property_settings(20)
@given(
    n=st.integers(1, 5),
    V=st.sampled_from([2, 700, 1024, 2500, 5000]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
    temperature=st.sampled_from([1.0, 0.7, 1.3]),
    splits=st.sampled_from([1, 4, 8]),
)
def test_programs_that_share_a_row_draw_as_one_program_does(n, V, seed, dtype, temperature, splits):
    logits, u = _logits(n, V, seed, dtype), torch.from_numpy(uniform_range(n, seed, Stream.SAMPLE))
    u[0] = (0.0, 1.0 - 2.0**-53, float(u[0]))[seed % 3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw_triton, "SPLITS", splits)
        drawn = draw_tokens(logits, u, SamplingParams(temperature))
    assert total_unequal(drawn, by_rows(logits, u, temperature)) == 0


def test_control_other_numbers_and_tiles_have_other_bits(monkeypatch):
    logits, u = _logits(40, 5000, 0, torch.bfloat16), torch.from_numpy(uniform_range(40, 1, Stream.SAMPLE))
    expected = by_rows(logits, u, 1.0)
    assert total_unequal(draw_tokens(logits, u.flip(0), SamplingParams()), expected) > 0
    monkeypatch.setattr(draw_triton, "TILE", 2048)
    assert total_unequal(draw_tokens(logits, u, SamplingParams())[1:], expected[1:]) > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.7), SamplingParams(1.0, 5)])
def test_logits_that_are_not_finite_give_a_logp_that_is_not(bad, params):
    logits, u = randn(0, 3, 2000), torch.full((3,), 0.5, dtype=torch.float64)
    logits[1, 1500] = bad
    ids, logp = draw_tokens(logits, u, params)
    assert torch.isfinite(logp).tolist() == [True, False, True]
    assert ((ids >= 0) & (ids < 2000)).all()
