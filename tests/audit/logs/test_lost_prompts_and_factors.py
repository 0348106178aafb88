"""Prompts that a resume lost, loaders that restarted twice, and metrics that are k times the other run's."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from zerokl.audit.logs.factors import factor_words
from zerokl.cli import main

PER_STEP, GROUP, RESUME = 4, 2, 4
ORDER = random.Random(0).sample(range(64), 64)


def write(file: Path, rows: list[dict]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def rollouts(steps: int, prompts_of: Callable[[int], list[int]]) -> list[dict]:
    """Tokens follow from the prompt alone."""
    return [
        {
            "prompt_ids": [5, 100 + prompt, 6],
            "completion_ids": [prompt, sample],
            "logprobs": [-1.0, -0.5],
            "step": step,
            "prompt": place,
            "sample": sample,
        }
        for step in range(steps)
        for place, prompt in enumerate(prompts_of(step))
        for sample in range(GROUP)
    ]


def slots(sequence: list[int]) -> Callable[[int], list[int]]:
    return lambda step: sequence[step * PER_STEP : (step + 1) * PER_STEP]


def restarted(*resumes: int) -> Callable[[int], list[int]]:
    """The loader begins anew at each resume."""
    return lambda step: slots(ORDER)(step - max((r for r in resumes if r <= step), default=0))


def lost(*places: int, seed: int | None = None) -> Callable[[int], list[int]]:
    """Some places of the order never come; with a seed the order within each step is another one too."""
    sequence = slots([p for place, p in enumerate(ORDER) if place not in places])
    return lambda step: (
        sequence(step)
        if seed is None or step < RESUME
        else random.Random(seed + step).sample(sequence(step), PER_STEP)
    )


@pytest.fixture
def differ(tmp_path, capsys):
    """differ(prompts of B by step, steps of B): what is said of its loader, after a sound A of 12 steps."""

    def run(prompts_of: Callable[[int], list[int]], steps: int = 12) -> str:
        a = write(tmp_path / "a.jsonl", rollouts(12, slots(ORDER)))
        b = write(tmp_path / "b.jsonl", rollouts(steps, prompts_of))
        assert main(["diff", str(a), str(b)]) == 1
        return " ".join(capsys.readouterr().out.split())

    return run


def test_a_second_restart_is_named_with_the_first(differ):
    words = differ(restarted(4, 7))
    assert "prompts from step 4 on are those of A's steps 0 to 2" in words
    assert "prompts from step 7 on are those of A's steps 0 to 4" in words
    assert "restarted more than once" in words
    assert "another seed" not in words
    assert "more than once" not in differ(restarted(4))


@pytest.mark.parametrize("seed", [None, 1])
def test_lost_prompts_are_counted_and_named_in_whichever_order_a_step_ends(differ, seed):
    words = differ(lost(17, 22, 23, 30, 37, 40, seed=seed))
    assert "6 prompts of A's steps 4 to 10 never come in B (12 completions" in words
    assert "a.jsonl, line 35, " in words
    assert "what is left keeps A's order" in words
    assert "another seed" not in words


@pytest.mark.parametrize("seed", range(20))
def test_control_another_order_is_no_loss(differ, seed):
    other = ORDER[:16] + random.Random(seed).sample(ORDER[16:], 48)
    words = differ(slots(other))
    assert "shuffled with another seed" in words
    assert "never come" not in words
    assert "restarted" not in words


def test_two_that_changed_places_are_no_loss(differ):
    other = [*ORDER]
    other[17], other[30] = other[30], other[17]
    assert "never come" not in differ(slots(other))


def verl(clock: int, grad: float = 1.0, nested: bool = True) -> list[dict]:
    """Metrics as verl's file logger writes them."""
    times, values = random.Random(clock), random.Random(0)
    rows = []
    for step in range(1, 9):
        data = {
            "actor/lr": 1e-6 * (1 - step / 20),
            "actor/grad_norm": grad * (1 + values.random()),
            "critic/score/mean": values.random(),
            "timing_s/step": 30 + times.random(),
            "timing_per_token_ms/gen": times.random(),
            "perf/throughput": times.random(),
        }
        rows.append({"step": step, "data": data} if nested else {"step": step, **data})
    return rows


@pytest.mark.parametrize("nested", [True, False])
def test_equal_metrics_of_verl_are_equal(tmp_path, capsys, nested):
    a, b, c = (
        str(write(tmp_path / f"{name}.jsonl", verl(clock, grad, nested)))
        for name, clock, grad in (("a", 1, 1.0), ("b", 2, 1.0), ("c", 2, 0.25))
    )
    assert main(["diff", a, b]) == 0
    assert "equal: 4 metrics of 8 rows" in capsys.readouterr().out
    assert main(["diff", a, c]) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "actor/grad_norm 1.844" in words
    assert "actor/grad_norm of B is 0.25 x A's, in all 8 rows" in words


def pairs(*columns: tuple[list[float], list[float]]) -> list[tuple[dict, dict]]:
    """Rows of A and of B. columns: the values of both, metric by metric."""
    count = len(columns[0][0])
    return [
        tuple({f"m{n}": c[side][i] for n, c in enumerate(columns)} for side in (0, 1)) for i in range(count)
    ]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([([1.0, 2.0, 3.5], [0.3, 0.6, 1.05])], "m0 of B is 0.3 x A's, in all 3 rows"),
        (
            [([1.0, 2.0, 3.5], [0.25, 0.5, 0.9]), ([3.0, 1.0, 1.0], [0.75, 0.3, 0.2])],
            "m0 and m1 of B are 0.25",
        ),
        ([([1.0, 2.0], [0.25, 0.5])], ""),  # any two rows may have that
        ([([1.0, 1.0, 1.0], [0.25, 0.25, 0.25])], ""),  # two constants
        (
            [([1.0, 2.0, 3.0], [1.37, 2.5, 3.9]), ([2.0, 2.0, 2.0], [2.74, 2.4, 2.2])],
            "",
        ),  # one is twice the other
        (
            [([1.0, 2.0, 3.0], [0.25, 0.6, 0.8]), ([1.0, 2.0, 3.0], [0.25, 0.6, 0.8])],
            "",
        ),  # one metric, two names
        ([([0.0, 0.0, 0.0], [1.0, 2.0, 3.0])], ""),
    ],
)
def test_a_factor_needs_more_than_one_ratio(columns, expected):
    words = factor_words(pairs(*columns), [f"m{n}" for n in range(len(columns))])
    assert words.startswith(expected) if expected else not words
