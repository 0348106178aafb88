"""Hypotheses of a grid file: written down before its runs, and tested on them.

    [[hypotheses]]
    says = "the model that is saved is worse"
    figure = "held_out_last"            # one of FIGURES (figures.py)
    of = { sampler = "fp8" }            # of the combinations with these labels,
    against = { sampler = "exact" }     # beside those with labels of the same axes
    expects = "lower"                   # lower, higher or alike
    by = 0.05                           # by more than this; alike: the means differ by less than this
    alpha = 0.05

Two runs are a pair where the seed and all axes that are not named agree; d is their difference (of -
against). `lower` asks whether the mean of -d - by is above 0, `higher` whether that of d - by is, and `alike`
whether those of d + by and of by - d both are (two one-sided tests; Schuirmann, 1987). The test is exact:
under the opposite the sign of each such number is a coin, so p is the share of all 2^n choices of signs whose
mean is at least the observed one (Fisher, "The Design of Experiments", 1935, section 21). The p values of a
file are adjusted for their number (Holm, "A simple sequentially rejective multiple test procedure", 1979).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from ....files.reading import read_toml, shown
from ...config.config_file import validation_message
from ...config.section import Section
from .figures import FIGURES
from .grid import Cell

# Pairs that a test takes: all choices of signs are counted.
MOST_PAIRS = 22


class Hypothesis(Section):
    """What a grid file says beforehand about a figure of its combinations."""

    says: str
    """The hypothesis in words."""
    figure: Literal[FIGURES]  # type: ignore[valid-type]
    """The figure of a run that is compared."""
    of: dict[str, str]
    """The combinations that the hypothesis is about: axis -> label."""
    against: dict[str, str]
    """Those that they are compared with: a label for each of the same axes."""
    expects: Literal["lower", "higher", "alike"]
    """What is expected of the difference (of - against)."""
    by: float = Field(0.0, ge=0)
    """The difference that is exceeded, or that is not reached where both are expected to be alike."""
    alpha: float = Field(0.05, gt=0, lt=1)
    """The hypothesis has held where its adjusted p is not above this."""


def read_hypotheses(path: Path, cells: Sequence[Cell]) -> list[Hypothesis]:
    """The hypotheses of a grid file. cells: of the same file (grid.read_grid). Raises ValueError."""
    tables = read_toml(path).get("hypotheses", [])
    hypotheses = []
    for i, table in enumerate(tables, start=1):
        try:
            hypothesis = Hypothesis.model_validate(table)
        except ValidationError as error:
            message = validation_message(error).removeprefix("config: ")
            raise ValueError(f"ablate: {path}: hypothesis {i}: {message}") from None
        if fault := _fault(hypothesis, cells):
            raise ValueError(f"ablate: {path}: hypothesis {i}: {fault}")
        hypotheses.append(hypothesis)
    return hypotheses


def _fault(hypothesis: Hypothesis, cells: Sequence[Cell]) -> str:
    """Why a hypothesis cannot be tested on these cells, or ""."""
    for name in ("of", "against"):
        named = getattr(hypothesis, name)
        pairs = sum(_is_of(cell.settings, named) for cell in cells)
        if not pairs:
            return f"{name} ({shown(named)}) must name combinations of the grid, and names none"
        if pairs > MOST_PAIRS:
            return f"a hypothesis takes at most {MOST_PAIRS} pairs of runs, and this one has {pairs}"
    if hypothesis.of.keys() != hypothesis.against.keys():
        return "of and against must name the same axes"
    if hypothesis.expects == "alike" and not hypothesis.by:
        return "alike needs by, the difference not reached"
    return ""


def _is_of(settings: Mapping[str, str], named: Mapping[str, str]) -> bool:
    """Whether a combination has all the labels that are named, one at least."""
    return bool(named) and all(settings.get(axis) == label for axis, label in named.items())


def judged(
    hypotheses: Sequence[Hypothesis], combinations: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What became of each hypothesis: its own keys, differences, p, adjusted p, and `result`.

    combinations: of figures.summarise. differences: one for each pair that has finished, ordered by the
    axes that are not named, and then by seed. result: held; refuted, where the opposite is as certain; open,
    where neither is.
    """
    results = [_judged(hypothesis, combinations) for hypothesis in hypotheses]
    for name in ("p", "p_opposite"):
        for result, p in zip(results, holm([r[name] for r in results]), strict=True):
            result[f"{name}_adjusted"] = p
    for result in results:
        held, refuted = (result[name] <= result["alpha"] for name in ("p_adjusted", "p_opposite_adjusted"))
        result["result"] = "held" if held else "refuted" if refuted else "open"
    return results


def _judged(hypothesis: Hypothesis, combinations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tested, against = (
        _figures(combinations, side, hypothesis.figure) for side in (hypothesis.of, hypothesis.against)
    )
    d = np.array([tested[pair] - against[pair] for pair in sorted(tested.keys() & against.keys())])
    d = d[np.isfinite(d)]
    by = hypothesis.by
    if hypothesis.expects == "alike":
        p = max(p_above_zero(d + by), p_above_zero(by - d))
        opposite = min(1.0, 2.0 * min(p_above_zero(d - by), p_above_zero(-d - by)))
    else:
        x = d if hypothesis.expects == "higher" else -d
        p, opposite = p_above_zero(x - by), p_above_zero(by - x)
    mean = float(d.mean()) if len(d) else math.nan
    return hypothesis.model_dump() | {
        "differences": d.tolist(),
        "difference": mean,
        "p": p,
        "p_opposite": opposite,
    }


def _figures(
    combinations: Sequence[Mapping[str, Any]], named: Mapping[str, str], figure: str
) -> dict[tuple, float]:
    """The figure of each run of the combinations that are named, by its labels of other axes and its seed."""
    figures = {}
    for c in combinations:
        if _is_of(c["settings"], named):
            others = tuple(label for axis, label in c["settings"].items() if axis not in named)
            figures |= {(*others, run["seed"]): run[figure] for run in c["runs"]}
    return figures


def p_above_zero(x: np.ndarray) -> float:
    """The exact p of "the mean of x [n] is not above 0", if each sign is a coin; 1 where x is empty."""
    if not len(x):
        return 1.0
    sums = np.zeros(1)
    for size in np.abs(x):
        sums = np.concatenate([sums + size, sums - size])
    # Sums of the same numbers in another order differ in the last bits, and such sums are ties.
    return float((sums >= x.sum() - 1e-12 * np.abs(x).sum()).mean())


def holm(p: Sequence[float]) -> list[float]:
    """The p values, adjusted for their number by Holm's procedure."""
    adjusted, largest = list(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


def hypothesis_line(result: Mapping[str, Any]) -> str:
    """A tested hypothesis in words."""
    n = len(result["differences"])
    return (
        f"{result['result']}: {result['says']} ({result['figure']} {_named(result['of'])} against "
        f"{_named(result['against'])}: {result['difference']:+.3f} over {n} pair{'s' * (n != 1)}; expected "
        f"{expectation(result)}, p {result['p']:.2g}, adjusted {result['p_adjusted']:.2g})"
    )


def _named(settings: Mapping[str, str]) -> str:
    return ", ".join(settings.values())


def expectation(hypothesis: Mapping[str, Any]) -> str:
    """What a hypothesis expects of the difference, in words. hypothesis: its keys."""
    expects, by = hypothesis["expects"], hypothesis["by"]
    if expects == "alike":
        return f"alike to {by:g}"
    return f"{expects} by more than {by:g}" if by else expects
