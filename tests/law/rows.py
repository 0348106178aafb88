"""The operations of the kernels by rows, and the comparison of rows that were computed in other company."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from zerokl.kernels.add_shared import add_shared
from zerokl.kernels.draw import draw
from zerokl.kernels.embedding import embedding
from zerokl.kernels.gelu_mul import gelu_mul
from zerokl.kernels.linear import linear
from zerokl.kernels.logprob import linear_logprob
from zerokl.kernels.philox import Stream, uniform_range
from zerokl.kernels.qk_norm import qk_norm
from zerokl.kernels.rms_norm import add_rms_norm, rms_norm
from zerokl.kernels.rope import rope, rope_table
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.kernels.scale import scale
from zerokl.kernels.share_key import share_key
from zerokl.kernels.silu_mul import silu_mul
from zerokl.kernels.value_head import value_head

from tests.helpers import randint, randn, total_unequal
from tests.law import experts, routers

Rows = tuple[torch.Tensor, ...]


class Op(NamedTuple):
    """An operation by rows.

    rows(T, width, dtype, seed) makes the inputs, one row a token.
    run(rows, width, seed) gives the outputs, also one row a token.
    """

    rows: Callable[[int, int, torch.dtype, int], Rows]
    run: Callable[[Rows, int, int], Rows]


def _x(*widths: int | None) -> Callable[[int, int, torch.dtype, int], Rows]:
    """Inputs [T, width] for each None, and [T, h, width] for each number h."""

    def rows(T: int, width: int, dtype: torch.dtype, seed: int) -> Rows:
        shapes = [(T, width) if h is None else (T, h, width) for h in widths]
        return tuple(randn(seed + i, *shape, dtype=dtype, scale=2.0) for i, shape in enumerate(shapes))

    return rows


def out_width(width: int) -> int:
    return {896: 4864, 1024: 3072, 3072: 1024, 4864: 896}.get(width, width + 5)


def _linear(rows: Rows, K: int, seed: int) -> Rows:
    return (linear(rows[0], randn(seed, out_width(K), K, dtype=rows[0].dtype)),)


def _linear_bias(rows: Rows, K: int, seed: int) -> Rows:
    dtype, N = rows[0].dtype, out_width(K)
    return (linear(rows[0], randn(seed, N, K, dtype=dtype), randn(seed + 1, N, dtype=dtype)),)


def _rms_norm(rows: Rows, D: int, seed: int) -> Rows:
    return (rms_norm(rows[0], randn(seed, D, dtype=rows[0].dtype), 1e-6),)


def _add_rms_norm(rows: Rows, D: int, seed: int) -> Rows:
    return add_rms_norm(*rows, randn(seed, D, dtype=rows[0].dtype), 1e-6)


def _value_head(rows: Rows, D: int, seed: int) -> Rows:
    return value_head(rows[0], randn(seed, D, dtype=rows[0].dtype))


def _qk_norm(rows: Rows, D: int, seed: int) -> Rows:
    wq, wk = (randn(seed + i, D, dtype=rows[0].dtype) for i in (0, 1))
    return (qk_norm(rows[0], wq, wk, 2, 1e-6),)


def _shared_rows(T: int, width: int, dtype: torch.dtype, seed: int) -> Rows:
    e, s = (randn(seed + i, T, width, dtype=dtype, scale=2.0) for i in (0, 1))
    return e, s, randn(seed + 2, T, 1, dtype=dtype, scale=3.0)


def _router_rows(T: int, width: int, dtype: torch.dtype, seed: int) -> Rows:
    return (randn(seed, T, routers.EXPERTS, dtype=dtype, scale=3.0),)


def _rope_rows(T: int, width: int, dtype: torch.dtype, seed: int) -> Rows:
    position = randint(seed, 500, T)
    cos, sin = rope_table([10.0 ** (-i / width) for i in range(width)], 500, dtype)
    return randn(seed, T, 3, 2 * width, dtype=dtype), cos[position], sin[position]


def _logprob_rows(T: int, width: int, dtype: torch.dtype, seed: int) -> Rows:
    return randn(seed, T, width, dtype=dtype), randint(seed, out_width(width), T)


def _logprob(sampling_params: SamplingParams) -> Callable[[Rows, int, int], Rows]:
    def run(rows: Rows, D: int, seed: int) -> Rows:
        h, ids = rows
        w = randn(seed, out_width(D), D, dtype=h.dtype, scale=D**-0.5)
        return linear_logprob(h, w, ids, sampling_params)

    return run


def _filtered(rows: Rows, D: int, seed: int) -> Rows:
    """Every filter, with every second token allowed."""
    allowed = range(0, out_width(D), 2)
    return _logprob(SamplingParams.of(1.3, 20, 0.9, 0.02, {0: 2.0, 4: -1.5}, allowed))(rows, D, seed)


def _draw_rows(T: int, width: int, dtype: torch.dtype, seed: int) -> Rows:
    return randn(seed, T, width, scale=3.0), torch.from_numpy(uniform_range(T, seed, Stream.SAMPLE))


OPS = {
    "linear": Op(_x(None), _linear),
    "linear with bias": Op(_x(None), _linear_bias),
    "rms_norm": Op(_x(None), _rms_norm),
    "add_rms_norm": Op(_x(None, None), _add_rms_norm),
    "qk_norm": Op(_x(3), _qk_norm),
    "value_head": Op(_x(None), _value_head),
    "silu_mul": Op(
        lambda T, width, dtype, seed: (randn(seed, T, 2 * width, dtype=dtype, scale=3.0),),
        lambda r, *_: (silu_mul(r[0]),),
    ),
    "add_shared": Op(_shared_rows, lambda rows, *_: (add_shared(*rows),)),
    "sigmoid_router": Op(_router_rows, lambda rows, *_: routers.chosen(rows[0])),
    "gelu_mul": Op(
        lambda T, width, dtype, seed: (randn(seed, T, 2 * width, dtype=dtype, scale=3.0),),
        lambda r, *_: (gelu_mul(r[0]),),
    ),
    "scale": Op(
        lambda T, width, dtype, seed: (randn(seed, T, width, dtype=dtype),),
        lambda r, *_: (scale(r[0], 0.22),),
    ),
    "share_key": Op(_x(None), lambda rows, *_: (share_key(rows[0], 5),)),
    "rope": Op(_rope_rows, lambda rows, *_: (rope(*rows),)),
    "embedding": Op(
        lambda T, width, dtype, seed: (randint(seed, 50, T),),
        lambda rows, D, seed: (embedding(rows[0], randn(seed, 50, D)),),
    ),
    "linear_logprob": Op(_logprob_rows, _logprob(SamplingParams())),
    "linear_logprob at a temperature": Op(_logprob_rows, _logprob(SamplingParams(0.7))),
    "linear_logprob of top-k": Op(_logprob_rows, _logprob(SamplingParams(1.0, 5))),
    "linear_logprob of top-p": Op(_logprob_rows, _logprob(SamplingParams(1.0, 0, 0.8))),
    "linear_logprob of min-p": Op(_logprob_rows, _logprob(SamplingParams(1.0, 0, 1.0, 0.1))),
    "linear_logprob of all three": Op(_logprob_rows, _logprob(SamplingParams(1.3, 20, 0.9))),
    "linear_logprob of every filter": Op(_logprob_rows, _filtered),
    "experts": Op(_x(None), lambda r, D, seed: experts.mixture(r[0], *experts.weights(D, r[0].dtype, seed))),
    "draw": Op(_draw_rows, lambda rows, *_: (draw(*rows),)),
}
# Kernels that have no floating input of the model's dtype.
ONE_DTYPE = {"draw": torch.float32, "embedding": torch.float32}
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
    x: torch.Tensor, pick: torch.Tensor, places: torch.Tensor, T: int, poison: object, seed: int
) -> torch.Tensor:
    """T rows with x[pick] at `places`, and other rows or poison elsewhere."""
    padding = x[randint(seed, len(x), T)].flip(0)
    # Ids, and the fp64 uniform numbers of `draw`, are not poisoned.
    if poison != POISON[0] and x.dtype not in (torch.int64, torch.float64):
        padding = torch.full_like(padding, poison)
    padding[places] = x[pick]
    return padding


def unequal_rows(
    op: Op, dtype: torch.dtype, width: int, T: int, other_T: int, poison: object, seed: int
) -> int:
    """Elements whose bits differ between T rows together and some of these rows among other rows.

    The other call has other_T rows. A random part of the T rows lies at random places of it.
    """
    rows = op.rows(T, width, dtype, seed)
    whole = results(op, rows, lambda i, o: randn(seed + 7 + i, *o.shape, dtype=o.dtype), width, seed)
    shuffled = torch.randperm(T, generator=torch.Generator().manual_seed(seed))
    pick = shuffled[: 1 + seed % min(T, other_T)]
    places = torch.randperm(other_T, generator=torch.Generator().manual_seed(seed + 1))[: len(pick)]
    mixed = tuple(_scatter(r, pick, places, other_T, poison, seed) for r in rows)

    def mixed_dy(i: int, o: torch.Tensor) -> torch.Tensor:
        dy = randn(seed + 7 + i, T, *o.shape[1:], dtype=o.dtype)
        return _scatter(dy, pick, places, other_T, poison, seed)

    mixed_results = results(op, mixed, mixed_dy, width, seed)
    return total_unequal([r[pick] for r in whole], [r[places] for r in mixed_results])
