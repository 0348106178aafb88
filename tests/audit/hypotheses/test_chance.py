"""A hypothesis that chooses among many fits only where the same choice among shuffled numbers does not.

The columns are drawn here; no decoder computes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from zerokl.audit.conclusion.log_findings import none_fits
from zerokl.audit.formats.record import LoggedRollout
from zerokl.audit.hypotheses.chance import is_beyond_chance
from zerokl.audit.hypotheses.column_causes import try_columns
from zerokl.audit.hypotheses.tried import Tried

Columns = tuple[np.ndarray, np.ndarray]  # the sampler's and the trainer's, [C]


def log(
    seed: int, columns: Callable[[np.random.Generator, int], Columns], lines: int = 96
) -> list[LoggedRollout]:
    """Lines of a log, four for each prompt. columns: of a generator and a line's number."""
    rng, rollouts = np.random.default_rng(seed), []
    for i in range(lines):
        both = [np.float32(x) for x in columns(rng, i)]
        ids = tuple(rng.integers(3, 400, len(both[0])).tolist())
        rollouts.append(LoggedRollout((5, i // 4, 7), ids, *both))
    return rollouts


def padding_attended(rng: np.random.Generator, i: int) -> Columns:
    """A sure sampler, and a trainer that reads padding in all lines but those of the longest prompts."""
    s = -rng.gamma(0.3, 0.3, rng.integers(3, 5))
    return s, s - 1e-3 * rng.random(len(s)) if i // 4 % 4 == 0 else -rng.gamma(2.0, 2.5, len(s))


@cache
def padding_tried(seed: int) -> tuple[Tried, Tried]:
    """What is tried of a log of a trainer that reads padding, for each column."""
    return try_columns(log(seed, padding_attended))


@pytest.mark.parametrize("seed", range(6))
def test_short_lines_are_not_said_to_have_the_numbers_of_other_lines(seed):
    """Among 50 other lines of 3 or 4 tokens there is always one with nearly the same numbers."""
    sampler, trainer = padding_tried(seed)
    assert sampler.best is trainer.best is None
    (row,) = [row for row in sampler.rows if row.name == "another line's numbers"]
    assert row.candidates > 40
    assert row.left_by_chance < 0.2


def test_control_the_match_explains_what_a_fault_would():
    """Without the shuffled numbers it would be named: it leaves less than a tenth."""
    rows = [padding_tried(seed)[0].rows[0] for seed in range(6)]
    assert all(row.name == "another line's numbers" and not row.fits for row in rows)
    assert min(row.share_left for row in rows) < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_the_nearest_that_does_not_fit_says_among_how_many_it_chose(seed):
    sampler_tried, _ = padding_tried(seed)
    text = none_fits(SimpleNamespace(log=SimpleNamespace(hypotheses=sampler_tried))).text
    assert "The nearest is another line's numbers" in text
    assert f"the best of {sampler_tried.rows[0].candidates} candidates, which explain" in text
    unjudged = replace(sampler_tried, rows=[replace(sampler_tried.rows[0], left_by_chance=1.0)])
    text = none_fits(SimpleNamespace(log=SimpleNamespace(hypotheses=unjudged))).text
    assert "candidates" in text
    assert "shuffled" not in text, "nothing was tried on shuffled numbers"


@pytest.mark.parametrize(("tokens", "lines"), [((3, 5), 96), ((30, 50), 24), ((30, 50), 3)])
@pytest.mark.parametrize("rounding", [1e-5, 1e-2])
def test_the_numbers_of_another_line_are_named_in_short_and_long_lines(tokens, lines, rounding):
    def both(rng, i):
        s = -rng.gamma(1.0, 1.0, rng.integers(*tokens) if lines > 3 else tokens[0])
        return s, np.minimum(s + rounding * rng.standard_normal(len(s)) * (1.02 - np.exp(s)), 0.0)

    sound = log(0, both, lines)
    assert [x.best for x in try_columns(sound)] == [None, None]
    numbers = [x.logprobs for x in sound]
    by_length = sorted(range(lines), key=lambda i: (len(numbers[i]), i))
    moved = list(sound)
    for i, j in zip(by_length, [*by_length[1:], by_length[0]], strict=True):
        if len(numbers[i]) == len(numbers[j]):
            x = sound[i]
            moved[i] = LoggedRollout(x.prompt_ids, x.completion_ids, numbers[j], x.trainer_logprobs)
    named = [x.best for x in try_columns(moved)]
    assert {row.name for row in named if row} == {"another line's numbers"}
    assert all(row.candidates > 1 for row in named if row)


@pytest.mark.parametrize("by", [1, -1])
def test_numbers_off_by_one_are_named_in_short_lines(by):
    def both(rng, i):
        s = -rng.gamma(1.0, 1.0, 4)
        return np.roll(s, by), s

    named = try_columns(log(0, both))[0].best
    assert named.name == "off by one"
    assert named.candidates == 2
    assert named.left_by_chance > 10 * named.share_left


@pytest.mark.parametrize(
    ("left", "by_chance", "beyond"),
    [
        (0.02, 1.0, True),
        (0.7, 0.97, True),
        (0.001, 0.05, True),
        (0.0, 0.0, True),
        (0.02, 0.03, False),
        (0.5, 0.6, False),
    ],
)
def test_what_is_explained_must_be_several_times_what_chance_explains(left, by_chance, beyond):
    assert is_beyond_chance(left, by_chance) == beyond
