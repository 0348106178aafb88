"""Rounding is told from faults without a model: sound columns give no alarm, wrong numbers are found.

The columns are drawn here, with the tails and the line lengths of real ones; no decoder computes.
"""

from dataclasses import replace

import numpy as np
import pytest
from zerokl.audit.faults.ids import doubled_start, never_drawn
from zerokl.audit.formats.record import LoggedRollout
from zerokl.audit.hypotheses.column_causes import try_columns
from zerokl.audit.hypotheses.noise import Noise, is_rounding
from zerokl.audit.hypotheses.slope import slope

from tests.audit.rounded_lines import END, rounded_lines

SIZES = {"float32": 2e-5, "float16": 1.5e-3, "bfloat16": 1.2e-2}


def columns(seed: int, size: float, lines: int = 12) -> list[LoggedRollout]:
    """Lines whose two columns differ by rounding, of four prompts."""
    return rounded_lines(seed, size, lines, lambda _, i: (0, 5 + i % 4, 9))


def wrong(rollouts: list[LoggedRollout], places, values) -> list[LoggedRollout]:
    """The lines with other numbers of the trainer: values(i, column) at places(ids)."""
    result = []
    for i, x in enumerate(rollouts):
        column, there = x.trainer_logprobs.copy(), places(np.array(x.completion_ids))
        column[there] = values(i, x.trainer_logprobs)[there]
        result.append(LoggedRollout(x.prompt_ids, x.completion_ids, x.logprobs, column))
    return result


@pytest.mark.full
def test_two_hundred_sound_logs_give_no_alarm():
    for seed in range(200):
        dtype = list(SIZES)[seed % 3]
        rollouts = columns(
            seed, SIZES[dtype] * np.exp(np.random.default_rng(seed).normal(0, 0.3)), 3 + seed % 12
        )
        for tried in try_columns(rollouts):
            assert tried.best is None, (seed, tried.best)
            assert tried.is_rounding, (seed, tried)
            assert tried.where is None


def of_differences(*lines) -> list[LoggedRollout]:
    """Lines whose columns differ by these numbers, about -2."""
    result = []
    for i, d in enumerate(lines):
        column = np.full(len(d), -2.0, np.float32)
        ids = tuple(range(20 + i, 20 + i + len(d)))
        result.append(LoggedRollout((0, 5, 9), ids, column + np.float32(d), column))
    return result


@pytest.mark.parametrize(
    ("usual", "largest", "is_rounding"),
    [(1e-3, 0.04, True), (1e-3, 0.15, False), (1e-6, 0.04, False)],
    ids=["one bf16 rounding", "more than that", "beside equal tokens"],
)
def test_two_sides_that_share_most_roundings_differ_by_a_whole_one_now_and_then(usual, largest, is_rounding):
    lines = usual * np.random.default_rng(2).standard_normal((6, 40))
    lines[3, 7] = largest
    sampler, trainer = try_columns(of_differences(*lines))
    assert sampler.is_rounding is trainer.is_rounding is is_rounding
    assert not is_rounding or sampler.rounds_like == "bfloat16"


@pytest.mark.parametrize(("places", "words"), [([-1], "last token"), ([0, 64], "every 64th token")], ids=str)
def test_large_roundings_that_have_something_in_common_are_none(places, words):
    rng = np.random.default_rng(3)
    lines = 1e-3 * rng.standard_normal((60, 128))
    lines[:, places] = 0.025 * rng.choice([-1.0, 1.0], (60, len(places)))
    for tried in try_columns(of_differences(*lines)):
        assert not tried.is_rounding
        assert words in tried.where.words


@pytest.mark.parametrize(("declared", "named"), [(4, False), (6, True), (None, True)])
def test_decimals_are_no_fault_where_the_log_declares_them(declared, named):
    lines = [
        replace(x, logprobs=np.round(x.logprobs, 4), decimals=declared)
        for x in columns(3, SIZES["float32"] / 20)
    ]
    sampler, trainer = try_columns(lines)
    assert (sampler.best.name if sampler.best else "") == "rounded log-probabilities" * named
    assert sampler.is_rounding is trainer.is_rounding is not named
    assert trainer.best is None


CASES = {
    "0 at the end": (
        lambda ids: ids == END,
        lambda i, c: np.zeros_like(c),
        "in the end token (id 1) the trainer's",
    ),
    "0 in chunks": (
        lambda ids: np.arange(len(ids)) % 7 == 3,
        lambda i, c: np.zeros_like(c),
        "in every 7th token, from place 3 on the trainer's number is 0",
    ),
    "an earlier token": (
        lambda ids: np.arange(len(ids)) >= 45,
        lambda i, c: np.concatenate([np.zeros(3, np.float32), c[:-3]]),
        "that of an earlier token (3 before)",
    ),
    "base 2 in some lines": (lambda ids: ids >= 0, lambda i, c: c / (np.log(2) if i % 3 else 1), "base 2"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", SIZES)
def test_wrong_numbers_are_named_where_they_are(name, dtype):
    places, values, words = CASES[name]
    rollouts = wrong(columns(7, SIZES[dtype]), places, values)
    sampler, trainer = try_columns(rollouts)
    assert not sampler.is_rounding
    assert words in trainer.best.what
    assert sampler.best is None or trainer.best.left < sampler.best.left


def test_each_bound_of_rounding_sees_what_the_others_do_not():
    """A sign, a tail, one line: each below the others' bounds."""
    rng, noise = np.random.default_rng(0), Noise("bfloat16", 0.01)
    p = [np.full(80, -2.0)] * 10
    d = [0.009 * rng.standard_normal(80) for _ in range(10)]
    assert is_rounding(noise, d, p)
    signed = [x + 0.006 for x in d]
    tail = [*d[:9], np.where(np.arange(80) == 5, 0.4, d[9])]
    line = [*d[:9], 6.0 * d[9]]
    assert not any(is_rounding(noise, x, p) for x in (signed, tail, line, [3.0 * x for x in d]))
    assert is_rounding(noise, signed, p, signed=False)
    short = [x[:9].copy() for x in d]
    short[4][3] = 0.24  # one token of a tail is no line of its own; all tokens of a line are
    tailed = noise._replace(tail=30.0)
    assert is_rounding(tailed, short, [x[:9] for x in p])
    short[4] = 8.0 * d[4][:9]
    assert not is_rounding(tailed, short, [x[:9] for x in p])


def test_a_difference_that_follows_a_prediction_has_the_slope_1():
    rng = np.random.default_rng(1)
    effect, logp = [rng.standard_normal(200) * 0.01 for _ in range(5)], [np.full(200, -2.0)] * 5
    noise = [rng.standard_normal(200) * 0.02 for _ in range(5)]
    angle, errors = slope(effect, [e + n for e, n in zip(effect, noise, strict=True)], logp)
    assert 0.8 < angle < 1.2
    assert errors > 10
    assert slope(effect, noise, logp)[1] < 4


def test_a_doubled_and_a_never_drawn_token_are_seen_in_the_ids_alone():
    rollouts = columns(3, 0.01)
    assert doubled_start.look(rollouts, None) is never_drawn.look(rollouts, None) is None
    doubled = [LoggedRollout((0, *x.prompt_ids), x.completion_ids, x.logprobs, x.logprobs) for x in rollouts]
    assert "begin with token 0 twice" in doubled_start.look(doubled, None)
    template = [
        LoggedRollout(x.prompt_ids, (7, *x.completion_ids[1:]), x.logprobs, np.float32(x.logprobs - 4.0))
        for x in rollouts
    ]
    assert "begin with token 7" in never_drawn.look(template, None)
