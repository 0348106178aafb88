"""Hypotheses of a grid file: their exact test, its adjustment, and what is refused."""

import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zerokl.engine.runs.ablations.grid import read_grid
from zerokl.engine.runs.ablations.hypotheses import (
    Hypothesis,
    holm,
    hypothesis_line,
    judged,
    p_above_zero,
    read_hypotheses,
)

GRID = """
seeds = [0, 1]
[grid]
dtype = ["float32"]
[variants.run]
exact = {}
fp8 = { exact = false, "perturb.weights" = "float8_e5m2/tensor" }
[[hypotheses]]
says = "it is worse"
figure = "held_out_last"
of = { run = "fp8" }
against = { run = "exact" }
expects = "lower"
by = 0.05
"""


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=9))
def test_p_is_the_share_of_signs_with_such_a_mean(x):
    """Beside an enumeration in whole numbers, where ties are exact."""
    sums = [
        sum(s * v for s, v in zip(signs, x, strict=True))
        for signs in itertools.product((-1, 1), repeat=len(x))
    ]
    expected = Fraction(sum(total >= sum(x) for total in sums), len(sums))
    assert p_above_zero(np.array(x) / 64) == expected
    assert p_above_zero(np.array(x) / 100) == expected, "numbers that fp64 rounds have the same ties"


def test_p_of_nothing_is_one_and_of_ten_alike_is_the_least():
    assert p_above_zero(np.array([])) == 1.0
    assert p_above_zero(np.full(10, 0.1)) == 1 / 1024
    assert p_above_zero(np.full(10, -0.1)) == 1.0


def test_holms_adjustment():
    """The example of his procedure with four p values: 4, 3, 2 and 1 times, and never falling."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def hypothesis(expects: str, by: float) -> Hypothesis:
    return Hypothesis(
        says="so", figure="held_out_last", of={"run": "b"}, against={"run": "a"}, expects=expects, by=by
    )


def combinations(differences: list[float]) -> list[dict]:
    """Two combinations whose runs differ by these, in another order of seeds; one seed has no second run."""
    a = [{"seed": s, "held_out_last": 0.1 * s} for s in range(len(differences))]
    b = [{"seed": s, "held_out_last": 0.1 * s + d} for s, d in enumerate(differences)]
    return [
        {"settings": {"run": "a"}, "runs": [*a, {"seed": 99, "held_out_last": 5.0}]},
        {"settings": {"run": "b"}, "runs": [*b[::-1], {"seed": 98, "held_out_last": math.nan}]},
    ]


WORSE = [-0.11, -0.12, -0.13, -0.14, -0.15, -0.16]
NEAR = [-0.01, 0.01, 0.02, -0.02, 0.005, -0.005]


@pytest.mark.parametrize(
    ("expects", "by", "differences", "result"),
    [
        ("lower", 0.05, WORSE, "held"),
        ("lower", 0.5, WORSE, "refuted"),
        ("lower", 0.13, WORSE, "open"),
        ("higher", 0.0, WORSE, "refuted"),
        ("higher", 0.05, [-d for d in WORSE], "held"),
        ("alike", 0.05, NEAR, "held"),
        ("alike", 0.05, WORSE, "refuted"),
        ("alike", 0.05, [-d for d in WORSE], "refuted"),
        ("alike", 0.01, NEAR, "open"),
        ("lower", 0.0, WORSE[:2], "open"),
        ("lower", 0.0, [], "open"),
    ],
)
def test_what_becomes_of_a_hypothesis(expects, by, differences, result):
    (row,) = judged([hypothesis(expects, by)], combinations(differences))
    assert row["result"] == result
    assert sorted(row["differences"]) == pytest.approx(sorted(differences))
    assert hypothesis_line(row).startswith(f"{result}: so (")


def test_more_hypotheses_make_each_harder_to_hold():
    one = judged([hypothesis("lower", 0.0)], combinations(WORSE[:5]))
    three = judged([hypothesis("lower", 0.0)] * 3, combinations(WORSE[:5]))
    assert (one[0]["result"], three[0]["result"]) == ("held", "open")


def test_the_axes_that_are_not_named_make_pairs():
    """Only runs that agree in them are compared, whatever the order in which they come."""
    pair = hypothesis("lower", 0.05)
    crossed = [
        {
            "settings": c["settings"] | {"lr": lr},
            "runs": [r | {"held_out_last": r["held_out_last"] + shift} for r in c["runs"]],
        }
        for lr, shift in (("low", 0.0), ("high", 7.0))
        for c in combinations(WORSE[:3])[:: -1 if shift else 1]
    ]
    (row,) = judged([pair], crossed)
    assert row["differences"] == pytest.approx(WORSE[:3] * 2)
    assert row["p"] == 1 / 64
    one_place = pair.model_copy(
        update={"of": {"run": "b", "lr": "high"}, "against": {"run": "a", "lr": "low"}}
    )
    (row,) = judged([one_place], crossed)
    assert row["differences"] == pytest.approx([7 + d for d in WORSE[:3]])


def grid(tmp_path: Path, text: str) -> Path:
    (tmp_path / "grid.toml").write_text(text)
    return tmp_path / "grid.toml"


def test_a_grid_file_has_them(tmp_path):
    file = grid(tmp_path, GRID)
    (read,) = read_hypotheses(file, read_grid(file))
    assert (read.expects, read.by, read.alpha) == ("lower", 0.05, 0.05)


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        (
            'of = { run = "fp8" }',
            'of = { run = "fp4" }',
            "of ({'run': 'fp4'}) must name combinations of the grid, and names none",
        ),
        ('of = { run = "fp8" }', "of = {}", "names none"),
        ('of = { run = "fp8" }', 'of = { dtype = "float32" }', "must name the same axes"),
        ('"held_out_last"', '"held_out"', "hypothesis 1: figure"),
        ('expects = "lower"\nby = 0.05', 'expects = "alike"', "alike needs by"),
        ("by = 0.05", "by = -1", "hypothesis 1: by"),
        ("seeds = [0, 1]", f"seeds = {list(range(23))}", "at most 22 pairs of runs, and this one has 23"),
        ("says =", "said =", "hypothesis 1"),
    ],
)
def test_what_cannot_be_tested_is_refused_before_a_run(tmp_path, was, now, message):
    file = grid(tmp_path, GRID.replace(was, now))
    with pytest.raises(ValueError, match=r"ablate: .*grid\.toml: ") as error:
        read_hypotheses(file, read_grid(file))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
