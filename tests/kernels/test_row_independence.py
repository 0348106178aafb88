"""A row of every kernel, forward and backward, has its own bits:

whatever stands beside it, wherever it stands.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from zerokl.kernels.embedding import embedding
from zerokl.kernels.linear import linear
from zerokl.kernels.logprob import draw, linear_logprob
from zerokl.kernels.philox import Stream, uniform_range
from zerokl.kernels.rms_norm import add_rms_norm, rms_norm
from zerokl.kernels.rope import rope, rope_table
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.silu_mul import silu_mul

from tests.helpers import DTYPES, property_settings, randint, randn, threads, total_unequal

Rows = tuple[torch.Tensor, ...]


class Op(NamedTuple):
    """rows(T, width, dtype, seed) makes the inputs with one row a token; run(rows, width, seed) -> outputs,
    also by rows.
    """

    rows: Callable[[int, int, torch.dtype, int], Rows]
    run: Callable[[Rows, int, int], Rows]


def _x(*widths: int | None) -> Callable[[int, int, torch.dtype, int], Rows]:
    """Inputs [T, width] for each None, [T, h, width] for each number."""

    def rows(T: int, width: int, dtype: torch.dtype, seed: int) -> Rows:
        shapes = [(T, width) if h is None else (T, h, width) for h in widths]
        return tuple(randn(seed + i, *shape, dtype=dtype, scale=2.0) for i, shape in enumerate(shapes))

    return rows


def _out_width(width: int) -> int:
    return {896: 4864, 1024: 3072, 3072: 1024, 4864: 896}.get(width, width + 5)


def _linear(rows: Rows, K: int, seed: int) -> Rows:
    return (linear(rows[0], randn(seed, _out_width(K), K, dtype=rows[0].dtype)),)


def _linear_bias(rows: Rows, K: int, seed: int) -> Rows:
    dtype, N = rows[0].dtype, _out_width(K)
    return (linear(rows[0], randn(seed, N, K, dtype=dtype), randn(seed + 1, N, dtype=dtype)),)


def _rms_norm(rows: Rows, D: int, seed: int) -> Rows:
    return (rms_norm(rows[0], randn(seed, D, dtype=rows[0].dtype), 1e-6),)


def _add_rms_norm(rows: Rows, D: int, seed: int) -> Rows:
    return add_rms_norm(*rows, randn(seed, D, dtype=rows[0].dtype), 1e-6)


def _rope_rows(T: int, width: int, dtype: torch.dtype, seed: int) -> Rows:
    position = randint(seed, 500, T)
    cos, sin = rope_table([10.0 ** (-i / width) for i in range(width)], 500, dtype)
    return randn(seed, T, 3, 2 * width, dtype=dtype), cos[position], sin[position]


def _logprob_rows(T: int, width: int, dtype: torch.dtype, seed: int) -> Rows:
    return randn(seed, T, width, dtype=dtype), randint(seed, _out_width(width), T)


def _logprob(sampling_params: SamplingParams) -> Callable[[Rows, int, int], Rows]:
    def run(rows: Rows, D: int, seed: int) -> Rows:
        h, ids = rows
        w = randn(seed, _out_width(D), D, dtype=h.dtype, scale=D**-0.5)
        return linear_logprob(h, w, ids, sampling_params)

    return run


def _draw_rows(T: int, width: int, dtype: torch.dtype, seed: int) -> Rows:
    return randn(seed, T, width, scale=3.0), torch.from_numpy(uniform_range(T, seed, Stream.SAMPLE))


OPS = {
    "linear": Op(_x(None), _linear),
    "linear with bias": Op(_x(None), _linear_bias),
    "rms_norm": Op(_x(None), _rms_norm),
    "rms_norm of heads": Op(_x(3), _rms_norm),
    "add_rms_norm": Op(_x(None, None), _add_rms_norm),
    "silu_mul": Op(
        lambda T, width, dtype, seed: (randn(seed, T, 2 * width, dtype=dtype, scale=3.0),),
        lambda r, *_: (silu_mul(r[0]),),
    ),
    "rope": Op(_rope_rows, lambda rows, *_: (rope(*rows),)),
    "embedding": Op(
        lambda T, width, dtype, seed: (randint(seed, 50, T),),
        lambda rows, D, seed: (embedding(rows[0], randn(seed, 50, D)),),
    ),
    "linear_logprob": Op(_logprob_rows, _logprob(SamplingParams())),
    "linear_logprob at a temperature": Op(_logprob_rows, _logprob(SamplingParams(0.7))),
    "linear_logprob of top-k": Op(_logprob_rows, _logprob(SamplingParams(1.0, 5))),
    "linear_logprob of top-p": Op(_logprob_rows, _logprob(SamplingParams(1.0, 0, 0.8))),
    "linear_logprob of all three": Op(_logprob_rows, _logprob(SamplingParams(1.3, 20, 0.9))),
    "draw": Op(_draw_rows, lambda rows, *_: (draw(*rows),)),
}
# Kernels whose only floating input is not of the model's dtype, or that have none.
ONE_DTYPE = {"draw": torch.float32, "embedding": torch.float32}
CASES = [
    pytest.param(n, d, id=f"{n}-{d}".replace("torch.", ""))
    for n in OPS
    for d in DTYPES
    if ONE_DTYPE.get(n, d) == d
]
POISON = ("rows like the others", float("nan"), float("inf"), 0.0, 6e4)


def results(
    op: Op, rows: Rows, dy_of: Callable[[int, torch.Tensor], torch.Tensor], width: int, seed: int
) -> Rows:
    """Outputs and the gradients of the floating inputs, each with one row a token."""
    leaves = [
        r.detach().clone().requires_grad_() if r.dtype not in (torch.int64, torch.float64) else r
        for r in rows
    ]
    outs = op.run(tuple(leaves), width, seed)
    inputs = [r for r in leaves if r.requires_grad]
    dys = {i: dy_of(i, o) for i, o in enumerate(outs) if o.requires_grad}
    if not inputs or not dys:
        return outs
    grads = torch.autograd.grad([outs[i] for i in dys], inputs, list(dys.values()), allow_unused=True)
    return (*outs, *(g for g in grads if g is not None))


def _scatter(
    x: torch.Tensor, pick: torch.Tensor, at: torch.Tensor, T: int, poison: object, seed: int
) -> torch.Tensor:
    """T rows with x[pick] at the places `at`, and others or poison elsewhere."""
    padding = x[randint(seed, len(x), T)].flip(0)
    if poison != POISON[0] and x.dtype not in (
        torch.int64,
        torch.float64,
    ):  # fp64: the uniform numbers of `draw`
        padding = torch.full_like(padding, poison)
    padding[at] = x[pick]
    return padding


def unequal_rows(
    op: Op, dtype: torch.dtype, width: int, T: int, other_T: int, poison: object, seed: int
) -> int:
    """Elements whose bits differ between T rows computed together and some of them among other_T other rows."""
    rows = op.rows(T, width, dtype, seed)
    whole = results(op, rows, lambda i, o: randn(seed + 7 + i, *o.shape, dtype=o.dtype), width, seed)
    shuffled = torch.randperm(T, generator=torch.Generator().manual_seed(seed))
    pick = shuffled[: 1 + seed % min(T, other_T)]
    at = torch.randperm(other_T, generator=torch.Generator().manual_seed(seed + 1))[: len(pick)]
    mixed = tuple(_scatter(r, pick, at, other_T, poison, seed) for r in rows)

    def mixed_dy(i: int, o: torch.Tensor) -> torch.Tensor:
        dy = randn(seed + 7 + i, T, *o.shape[1:], dtype=o.dtype)
        return _scatter(dy, pick, at, other_T, poison, seed)

    return total_unequal([r[pick] for r in whole], [r[at] for r in results(op, mixed, mixed_dy, width, seed)])


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


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("width", [896, 1024, 3072, 4864])
def test_row_is_independent_of_the_others_at_real_widths(name, dtype, width):
    assert unequal_rows(OPS[name], dtype, width, T=37, other_T=70, poison=float("nan"), seed=width + 3) == 0
    assert unequal_rows(OPS[name], dtype, width, T=37, other_T=1, poison=float("nan"), seed=width) == 0


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

    one = run(1)
    assert total_unequal(one, run(2)) == 0
    assert total_unequal(one, run(4)) == 0


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


# Controls: what is wrong is found by the very comparison that the proofs use.


def _torch_silu_mul(rows: Rows, *_: int) -> Rows:
    g, u = rows[0].chunk(2, dim=1)
    return (F.silu(g.contiguous()) * u,)


def test_control_torch_silu_is_found():
    op = OPS["silu_mul"]._replace(run=_torch_silu_mul)
    assert sum(unequal_rows(op, torch.float32, 33, T, 1, 0.0, seed=T) for T in range(1, 60)) > 0


def test_control_torch_linear_is_found():
    op = OPS["linear"]._replace(run=lambda rows, K, seed: (F.linear(rows[0], randn(seed, _out_width(K), K)),))
    assert sum(unequal_rows(op, torch.float32, 896, T, 1, 0.0, seed=T) for T in (2, 16, 33, 64)) > 0


def test_control_another_seed_of_draw_is_found():
    z, u = OPS["draw"].rows(100, 33, torch.float32, 0)
    other = torch.from_numpy(uniform_range(100, 1, Stream.SAMPLE))
    assert total_unequal([draw(z, u)], [draw(z, u.clone())]) == 0
    assert total_unequal([draw(z, u)], [draw(z, other)]) > 0
