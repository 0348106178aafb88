"""How far the gradient from a sampler's rollouts is from the exact one: figures from inner products.

A policy gradient is a mean over rollouts. g is one from the sampler's rollouts, corrected or not; A and B are
two independent ones from exact rollouts of the same prompts, as many. E[A] = E[B] is the exact gradient, and
b = E[g] - E[A] is the bias of g. One step has one g, whose noise is as large as that of A. So each figure of
a step stands beside its floor: the value that it has where b = 0 and g is as noisy as A.

    cosine     (cos(g, A) + cos(g, B)) / 2             floor: cos(A, B)
    distance   |g - M| / |M|,  M = (A + B) / 2         floor: sqrt(3)/2 |A - B| / |M|
    inner      (<g, A> + <g, B>) / 2                   <A, B> of the exact draws

E|g - M|^2 = |b|^2 + tr Var g + tr Var A / 2 and E|A - B|^2 = 2 tr Var A, which gives that floor. Both inner
products are unbiased: E inner = <E g, E A>, and E<A, B> = |E A|^2. So they may be added over steps, and the
quotient of the sums is the length of E g along the exact gradient.

From n draws of each, bias and noise come apart. All means are over pairs of different draws, so each estimate
of a product is unbiased. Errors are those of the jackknife over draws: draw i of both is left out.

    cosine     of E g and E A
    length     <E g, E A> / |E A|^2                    1 without a bias
    bias       |b|^2 / |E A|^2                         0 without a bias; an estimate may be negative
    noise      sqrt(tr Var g) / |E A|                  of one step
    draws_cosine   mean of cos(g_i, A_j)               floor: mean of cos(A_i, A_j)

Shapes: n draws.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .mismatch import Estimate


def floor_of_step(exact: np.ndarray) -> dict[str, float]:
    """The floors of a step, and its exact draws alone. exact [2, 2]: the inner products of A and B.

    Keys: cosine, distance, inner, norm; norm is the root of the mean square.
    """
    (aa, ab), (_, bb) = exact.tolist()
    mean_square, apart = (aa + 2 * ab + bb) / 4, aa - 2 * ab + bb
    return {
        "cosine": _ratio(ab, _root(aa) * _root(bb)),
        "distance": _ratio(_root(0.75 * apart), _root(mean_square)),
        "inner": ab,
        "norm": _root((aa + bb) / 2),
    }


def figures_of_step(products: np.ndarray) -> dict[str, float]:
    """The figures of one step. products [3, 3]: the inner products of g, A and B.

    Keys: cosine, distance, inner, norm. A figure is NaN where a gradient is zero, or not finite.
    """
    (gg, ga, gb), (_, aa, ab), (*_, bb) = products.tolist()
    mean_square, inner = (aa + 2 * ab + bb) / 4, (ga + gb) / 2
    cosines = _ratio(ga, _root(gg) * _root(aa)), _ratio(gb, _root(gg) * _root(bb))
    return {
        "cosine": sum(cosines) / 2,
        "distance": _ratio(_root(gg - 2 * inner + mean_square), _root(mean_square)),
        "inner": inner,
        "norm": _root(gg),
    }


def _root(x: float) -> float:
    """The square root; of a square that rounding has made negative 0."""
    return math.sqrt(max(x, 0.0)) if x == x else math.nan


def _ratio(x: float, y: float) -> float:
    return x / y if y > 0 else math.nan


@dataclass(frozen=True)
class Bias:
    """How far a gradient is from the exact one, from n draws of each; see the formulas above."""

    cosine: Estimate
    length: Estimate
    bias: Estimate
    noise: Estimate
    draws_cosine: Estimate


@dataclass(frozen=True)
class ExactDraws:
    """What exact draws show of each other, and so the floor of what single draws show of a bias."""

    noise: Estimate
    draws_cosine: Estimate


@dataclass(frozen=True)
class DrawnBias:
    """The bias of a policy's gradient on the prompts of one step, from `draws` draws of each kind.

    losses: of the whole model, by loss. layers: the same of each layer.
    """

    step: int
    sampler: str
    draws: int
    prompts: int
    num_generations: int
    exact: ExactDraws
    losses: dict[str, Bias]
    layers: dict[str, dict[str, Bias]]


def check_draws(n: int) -> None:
    """Raise ValueError for fewer than 3 draws: where one is left out, a pair must be left."""
    if n < 3:
        raise ValueError(
            f"gradient: draws ({n}) must be at least 3; the error leaves one out, and needs a pair"
        )


def estimate(products: np.ndarray) -> Bias:
    """The estimates of n draws of g and n exact ones.

    products [2n, 2n]: the inner products of all, those of g first. Raises ValueError (see check_draws).
    """
    n = len(products) // 2
    check_draws(n)
    return Bias(*(_jackknife(products, n, figure) for figure in (_cosine, _length, _bias, _noise, _of_draws)))


def of_exact(products: np.ndarray) -> ExactDraws:
    """The noise of n exact draws, and the mean cosine of two. products [n, n]. Raises as `estimate` does."""
    n = len(products)
    check_draws(n)
    return ExactDraws(_jackknife(products, n, _exact_noise), _jackknife(products, n, _exact_cosine))


class _Means(NamedTuple):
    """Unbiased estimates: |E g|^2, <E g, E A>, |E A|^2; and the mean of |g|^2."""

    sampled: float
    cross: float
    exact: float
    square: float


def _means(products: np.ndarray) -> _Means:
    n = len(products) // 2
    sampled, cross, exact = products[:n, :n], products[:n, n:], products[n:, n:]
    return _Means(_of_pairs(sampled), _mean(cross.ravel()), _of_pairs(exact), _mean(np.diag(sampled)))


def _mean(values: np.ndarray) -> float:
    return math.fsum(values.tolist()) / len(values) if np.isfinite(values).all() else math.nan


def _of_pairs(square: np.ndarray) -> float:
    """The mean over pairs of different draws. square [n, n]"""
    return _mean(square[~np.eye(len(square), dtype=bool)])


def _cosine(products: np.ndarray) -> float:
    m = _means(products)
    return _ratio(m.cross, _root(m.sampled) * _root(m.exact))


def _length(products: np.ndarray) -> float:
    m = _means(products)
    return _ratio(m.cross, m.exact)


def _bias(products: np.ndarray) -> float:
    m = _means(products)
    return _ratio(m.sampled - 2 * m.cross + m.exact, m.exact)


def _noise(products: np.ndarray) -> float:
    m = _means(products)
    return _ratio(_root(m.square - m.sampled), _root(m.exact))


def _cosines(products: np.ndarray) -> np.ndarray:
    """The cosine of every two draws; NaN where one of them is zero."""
    norms = np.sqrt(np.diag(products))
    with np.errstate(divide="ignore", invalid="ignore"):
        return products / np.outer(norms, norms)


def _of_draws(products: np.ndarray) -> float:
    n = len(products) // 2
    return _mean(_cosines(products)[:n, n:].ravel())


def _exact_noise(products: np.ndarray) -> float:
    signal = _of_pairs(products)
    return _ratio(_root(_mean(np.diag(products)) - signal), _root(signal))


def _exact_cosine(products: np.ndarray) -> float:
    return _of_pairs(_cosines(products))


def _jackknife(products: np.ndarray, n: int, figure: Callable[[np.ndarray], float]) -> Estimate:
    """A figure and its error: (n - 1) / n times the sum of squares of its values with one draw left out.

    products [k n, k n]: of k kinds of draws, one kind after another.
    """
    left = []
    for i in range(n):
        kept = np.flatnonzero(np.arange(len(products)) % n != i)
        left.append(figure(products[np.ix_(kept, kept)]))
    centre = sum(left) / n
    error = math.sqrt((n - 1) / n * sum((x - centre) ** 2 for x in left))
    return Estimate(figure(products), error)
