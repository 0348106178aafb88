"""A row of every kernel has its own bits, forward and backward, in any company and at any place."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels.draw import draw
from zerokl.kernels.linear import linear
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.philox import Stream, uniform_range
from zerokl.kernels.rms_norm import rms_norm
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.silu_mul import silu_mul

from tests.helpers import DTYPES, property_settings, randint, randn, threads, total_unequal
from tests.law.rows import ONE_DTYPE, OPS, POISON, Rows, out_width, results, unequal_rows

CASES = [
    pytest.param(n, d, id=f"{n}-{d}".replace("torch.", ""))
    for n in OPS
    for d in DTYPES
    if ONE_DTYPE.get(n, d) == d
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@property_settings(20)
@given(
    width=st.sampled_from([1, 7, 16, 33, 100, 257]),
    T=st.integers(1, 130),
    other_T=st.integers(1, 130),
    poison=st.sampled_from(POISON),
    seed=st.integers(0, 10_000),
)
def test_row_is_independent_of_the_others(name, dtype, width, T, other_T, poison, seed):
    assert unequal_rows(OPS[name], dtype, width, T, other_T, poison, seed) == 0


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("width", [896, 1024, 3072, 4864])
def test_row_is_independent_of_the_others_at_real_widths(name, dtype, width):
    assert unequal_rows(OPS[name], dtype, width, T=37, other_T=70, poison=float("nan"), seed=width + 3) == 0
    assert unequal_rows(OPS[name], dtype, width, T=37, other_T=1, poison=float("nan"), seed=width) == 0


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_is_independent_of_the_others_at_a_real_vocabulary(dtype):
    V, D = 151936, 64
    w = randn(0, V, D, dtype=dtype, scale=D**-0.5)
    h, ids = randn(1, 40, D, dtype=dtype), randint(2, V, 40)
    for sampling_params in (SamplingParams(), SamplingParams(0.8, 50, 0.95)):
        with torch.no_grad():
            together = linear_logprob(h, w, ids, sampling_params)
            alone = linear_logprob(h[17:18], w, ids[17:18], sampling_params)
        assert total_unequal([x[17:18] for x in together], alone) == 0
    u = torch.from_numpy(uniform_range(40, 0, Stream.SAMPLE))
    z = (h[:5] @ w.t()).float()
    assert draw(z, u[:5])[3] == draw(z[3:4], u[3:4])[0]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_row_is_independent_of_the_number_of_threads(name, dtype):
    op, width, seed = OPS[name], 1024, 5
    rows = op.rows(45, width, dtype, seed)

    def run(n: int) -> Rows:
        with threads(n):
            return results(op, rows, lambda i, o: randn(i, *o.shape, dtype=o.dtype), width, seed)

    one_thread = run(1)
    assert total_unequal(one_thread, run(2)) == 0
    assert total_unequal(one_thread, run(4)) == 0


@pytest.mark.parametrize("offset", [1, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_is_independent_of_its_alignment_in_memory(dtype, offset):
    K, N, T = 48, 80, 5

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.new_zeros(offset), x.reshape(-1)])[offset:].view(x.shape)

    x, w = randn(0, T, K, dtype=dtype), randn(1, N, K, dtype=dtype)
    with torch.no_grad():
        assert total_unequal([linear(x, w)], [linear(shifted(x), shifted(w))]) == 0
        assert total_unequal([silu_mul(x)], [silu_mul(shifted(x))]) == 0
        assert total_unequal([rms_norm(x, w[0], 1e-6)], [rms_norm(shifted(x), w[0], 1e-6)]) == 0


# Controls: the comparison that the proofs use finds what is wrong.


def _torch_silu_mul(rows: Rows, *_: int) -> Rows:
    g, u = rows[0].chunk(2, dim=1)
    return (F.silu(g.contiguous()) * u,)


def test_control_torch_silu_is_found():
    op = OPS["silu_mul"]._replace(run=_torch_silu_mul)
    assert sum(unequal_rows(op, torch.float32, 33, T, 1, 0.0, seed=T) for T in range(1, 60)) > 0


def test_control_torch_linear_is_found():
    op = OPS["linear"]._replace(run=lambda rows, K, seed: (F.linear(rows[0], randn(seed, out_width(K), K)),))
    assert sum(unequal_rows(op, torch.float32, 896, T, 1, 0.0, seed=T) for T in (2, 16, 33, 64)) > 0


def test_control_another_seed_of_draw_is_found():
    z, u = OPS["draw"].rows(100, 33, torch.float32, 0)
    other_u = torch.from_numpy(uniform_range(100, 1, Stream.SAMPLE))
    assert total_unequal([draw(z, u)], [draw(z, u.clone())]) == 0
    assert total_unequal([draw(z, u)], [draw(z, other_u)]) > 0
