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

Shapes: n draws.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


def floor_of_step(exact: np.ndarray) -> dict[str, float]:
    """The floors of a step, and its exact draws alone. exact [2, 2]: the inner products of A and B.

    Keys: cosine, distance, inner, norm; norm is the root of the mean square.
    """
    (aa, ab), (_, bb) = exact.tolist()
    of_mean, apart = (aa + 2 * ab + bb) / 4, aa - 2 * ab + bb
    return {
        "cosine": _ratio(ab, _root(aa) * _root(bb)),
        "distance": _ratio(_root(0.75 * apart), _root(of_mean)),
        "inner": ab,
        "norm": _root((aa + bb) / 2),
    }


def figures_of_step(products: np.ndarray) -> dict[str, float]:
    """The figures of one step. products [3, 3]: the inner products of g, A and B.

    Keys: cosine, distance, inner, norm. A figure is NaN where a gradient is zero, or not finite.
    """
    (gg, ga, gb), (_, aa, ab), (*_, bb) = products.tolist()
    of_mean, inner = (aa + 2 * ab + bb) / 4, (ga + gb) / 2
    cosines = _ratio(ga, _root(gg) * _root(aa)), _ratio(gb, _root(gg) * _root(bb))
    return {
        "cosine": sum(cosines) / 2,
        "distance": _ratio(_root(gg - 2 * inner + of_mean), _root(of_mean)),
        "inner": inner,
        "norm": _root(gg),
    }


def _root(x: float) -> float:
    """The square root; of a square that rounding has made negative 0."""
    return math.sqrt(max(x, 0.0)) if x == x else math.nan


def _ratio(x: float, y: float) -> float:
    return x / y if y > 0 else math.nan


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Bias:
    """How far a gradient is from the exact one, from n draws of each; see the formulas above."""

    cosine: Estimate
    length: Estimate
    bias: Estimate
    noise: Estimate


def estimate(products: np.ndarray) -> Bias:
    """The estimates of n draws of g and n exact ones.

    products [2n, 2n]: the inner products of all, those of g first. Draws of one number may be of equal
    prompts. Raises ValueError for fewer than 3 draws: the jackknife leaves one out, and pairs must be left.
    """
    n = len(products) // 2
    if n < 3:
        raise ValueError(f"gradient: draws ({n}) must be at least 3: an error needs pairs with one left out")
    return Bias(*(_jackknife(products, figure) for figure in (_cosine, _length, _bias, _noise)))


class _Means(NamedTuple):
    """Unbiased estimates: |E g|^2, <E g, E A>, |E A|^2; and the mean of |g|^2."""

    own: float
    cross: float
    exact: float
    square: float


def _means(products: np.ndarray) -> _Means:
    n = len(products) // 2
    own, cross, exact = products[:n, :n], products[:n, n:], products[n:, n:]
    apart = ~np.eye(n, dtype=bool)
    means = (math.fsum(x.tolist()) / x.size for x in (own[apart], cross.ravel(), exact[apart], np.diag(own)))
    return _Means(*means)


def _cosine(m: _Means) -> float:
    return _ratio(m.cross, _root(m.own) * _root(m.exact))


def _length(m: _Means) -> float:
    return _ratio(m.cross, m.exact)


def _bias(m: _Means) -> float:
    return _ratio(m.own - 2 * m.cross + m.exact, m.exact)


def _noise(m: _Means) -> float:
    return _ratio(_root(m.square - m.own), _root(m.exact))


def _jackknife(products: np.ndarray, figure: Callable[[_Means], float]) -> Estimate:
    """A figure and its error: (n - 1) / n times the sum of squares of its values with one draw left out."""
    n = len(products) // 2
    left = []
    for i in range(n):
        kept = [j for j in range(2 * n) if j % n != i]
        left.append(figure(_means(products[np.ix_(kept, kept)])))
    centre = sum(left) / n
    error = math.sqrt((n - 1) / n * sum((x - centre) ** 2 for x in left))
    return Estimate(figure(_means(products)), error)
