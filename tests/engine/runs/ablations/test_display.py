"""What `zerokl ablate` shows: the grid at 80 columns, its lines without a terminal, and what differs."""

import io
import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from zerokl.engine.config.run_config import Config
from zerokl.engine.display.terminal import Printer
from zerokl.engine.runs.ablations.cells import CellRun, State
from zerokl.engine.runs.ablations.display import (
    SIGNS,
    GridDisplay,
    grid_lines,
    seconds_left,
    shortened,
)
from zerokl.engine.runs.ablations.effects import (
    COMPARED,
    chance_in,
    effect_line,
    effect_lines,
    effects,
    verdict,
)
from zerokl.engine.runs.ablations.figures import FIGURES, spread
from zerokl.engine.runs.ablations.grid import Cell
from zerokl.engine.runs.ablations.result_table import result_table

from tests.helpers import property_settings


def cell(name: str, seed: int, folder: Path, state: State = State.LEFT, steps: int = 0) -> CellRun:
    """A cell of 10 steps, of which `steps` are done."""
    config = Config(seed=seed, steps=10)
    run = CellRun(Cell(name, {"name": name}, config), folder / name / f"seed-{seed}")
    run.state, run.steps = state, steps
    run.reward = run.first_reward = 0.25 if steps else None
    return run


def texts(runs, width: int = 80, height: int = 24, ascii_only: bool = False) -> list[str]:
    return [line.plain for line in grid_lines(runs, GridDisplay(runs).counts(), width, height, ascii_only)]


def test_the_grid_has_a_row_for_each_combination_and_a_sign_for_each_seed(tmp_path):
    states = [State.DONE, State.STOPPED, State.RUNNING, State.LEFT, State.FAILED]
    runs = [
        cell("dtype=float32", seed, tmp_path, state, 10 if seed < 2 else 3 * (seed == 2))
        for seed, state in enumerate(states)
    ]
    runs += [cell("dtype=float16", seed, tmp_path) for seed in range(5)]
    head, first, second, running = texts(runs)
    assert head.startswith("2/10 done, 1 running, 6 left, 1 failed, about ")
    assert first.startswith("dtype=float32 ")
    assert "● ◆ ▶ · ✗" in first
    assert first.rstrip().endswith("0.250")
    assert "· · · · ·" in second
    assert running == "▶ dtype=float32/seed-2  3/10 steps  reward 0.250"
    assert "o ! > . x" in texts(runs, ascii_only=True)[1]


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60), (20, 6)])
@pytest.mark.parametrize("combinations", [1, 12, 400])
def test_no_line_is_wider_than_the_terminal_and_none_too_many(
    tmp_path, ascii_only, width, height, combinations
):
    states = list(State)
    name = "dtype=bfloat16,importance_sampling_level=sequence,perturb=amplified-by-a-lot,number={}"
    runs = [
        cell(name.format(i), seed, tmp_path, states[(i + seed) % 5], 3)
        for i in range(combinations)
        for seed in range(3)
    ]
    lines = texts(runs, width, height, ascii_only)
    assert max(map(len, lines)) <= width
    assert len(lines) < height
    assert not ascii_only or all(line.isascii() for line in lines)


def test_names_from_a_grid_file_bring_no_control_characters(tmp_path):
    runs = [cell("a\x1b[31m\nb", 0, tmp_path, State.RUNNING, 1)]
    assert all(line.isprintable() for line in texts(runs))


def test_a_long_grid_shows_where_the_work_is(tmp_path):
    runs = [cell(f"n={i}", 0, tmp_path, State.DONE, 10) for i in range(1000)]
    runs += [cell("n=1000", 0, tmp_path, State.RUNNING, 1)]
    runs += [cell(f"n={i}", 0, tmp_path) for i in range(1001, 2000)]
    assert any(SIGNS[State.RUNNING][0] in line for line in texts(runs)[1:-1])


@given(st.text(max_size=50), st.integers(1, 60), st.booleans())
@property_settings(100)
def test_a_shortened_text_keeps_its_ends(text, width, ascii_only):
    short, dots = shortened(text, width, ascii_only), "..." if ascii_only else "…"
    assert len(short) == min(len(text), width)
    if len(text) <= width:
        assert short == text
    elif width > len(dots) + 2:
        end = (width - len(dots)) // 2
        begin = short[: width - len(dots) - end]
        assert (text.startswith(begin), text.endswith(short[-end:])) == (True, True)
        assert short == begin + dots + short[-end:]


def test_the_time_that_is_left_follows_from_the_steps_of_this_ablation(tmp_path):
    kept = cell("a", 0, tmp_path, State.DONE, 10)
    kept.kept = 10
    runs = [kept, cell("a", 1, tmp_path, State.RUNNING, 5), cell("a", 2, tmp_path)]
    assert seconds_left(runs, 20.0) == pytest.approx(20.0 * 15 / 5)
    assert seconds_left([kept, cell("a", 2, tmp_path)], 20.0) is None, "no step says how long one takes"


def test_steps_are_counted_as_they_are_written(tmp_path):
    run = cell("a", 0, tmp_path)
    run.path.mkdir(parents=True)
    file = run.path / "metrics.jsonl"
    lines = [json.dumps({"step": i, "reward/mean": i / 10}) + "\n" for i in range(4)]
    for written, steps, reward in [
        ("", 0, None),
        (lines[0] + lines[1][:9], 1, 0.0),
        ("".join(lines), 4, 0.3),
        ("".join(lines[:2]), 2, 0.1),
    ]:
        file.write_text(written)
        run._read_metrics()
        assert (run.steps, run.reward) == (steps, reward)


def combination(settings: dict[str, str], rewards: list[float]) -> dict:
    runs = [dict.fromkeys(COMPARED, math.nan) | {"reward_last10": reward} for reward in rewards]
    return {"settings": settings, "runs": runs} | {f: spread([run[f] for run in runs]) for f in COMPARED}


def test_a_difference_exceeds_the_seeds_spread_where_the_ranges_do_not_overlap():
    rows = effects(
        [
            combination({"dtype": "a", "loss": "x"}, [0.1, 0.15, 0.2]),
            combination({"dtype": "a", "loss": "y"}, [0.1, 0.25, 0.4]),
            combination({"dtype": "b", "loss": "x"}, [0.3, 0.4, 0.5]),
            combination({"dtype": "b", "loss": "y"}, [0.5, 0.6, 0.7]),
        ]
    )
    by_factor = {e["factor"]: e for e in rows}
    assert [e["figure"] for e in rows] == ["reward_last10"] * 2, "a figure that no run has is left out"
    dtype, loss = by_factor["dtype"], by_factor["loss"]
    assert (dtype["higher"], dtype["lower"], dtype["places"]) == (2, 0, 2)
    assert dtype["difference"] == pytest.approx((0.25 + 0.35) / 2)
    assert verdict(dtype) == "exceeds"
    assert effect_line(dtype).endswith(
        "b against a, reward of the last 10 steps +0.3: exceeds the seeds' spread in all 2 comparisons "
        "(one comparison by chance: 1 in 10)"
    )
    assert (loss["higher"], loss["lower"], verdict(loss)) == (0, 0, "within"), "0.5 touches 0.5"
    assert effect_lines(rows)[0] == effect_line(dtype)


@pytest.mark.parametrize(
    ("a", "b", "answer", "words"),
    [
        ([0.1], [0.9], "unknown", "1 seed is too few to tell"),
        ([0.1, 0.2], [0.8, 0.9], "unknown", "2 seeds are too few to tell"),
        ([0.1, 0.2, 0.3], [0.8, 0.9], "unknown", "2 seeds are too few to tell"),
        ([0.1, 0.2, math.nan], [0.7, 0.8, 0.9], "unknown", "2 seeds are too few to tell"),
        ([0.5, 0.6, 0.7], [0.1, 0.2, 0.3], "exceeds", "exceeds the seeds' spread (one comparison by chance:"),
        ([0.5, 0.6, 0.7], [0.5, 0.6, 0.7], "within", "within the seeds' spread"),
    ],
)
def test_what_a_pair_of_values_shows(a, b, answer, words):
    (effect,) = effects([combination({"x": "1"}, a), combination({"x": "2"}, b)])
    assert verdict(effect) == answer
    assert words in effect_line(effect)
    assert (effect["higher"] + effect["lower"] > 0) == (answer == "exceeds")


@pytest.mark.parametrize("seeds", [2, 3, 4, 5])
def test_the_chance_of_separate_ranges_is_that_of_all_orders(seeds):
    """Of all ways to divide 2n different values among two sides, those in which the ranges are separate."""
    ways = list(itertools.combinations(range(2 * seeds), seeds))
    separate = [w for w in ways if w in (tuple(range(seeds)), tuple(range(seeds, 2 * seeds)))]
    assert chance_in(seeds) == len(ways) / len(separate)


def result(dtype: str, seeds: int) -> dict:
    """A combination with all that the table shows."""
    settings = {"dtype": dtype, "sampler": "amplified", "correction": "none"}
    figures = {name: spread([0.123456 + 0.01 * seed for seed in range(seeds)]) for name in FIGURES}
    return {"settings": settings, "seeds": list(range(seeds)), "collapsed": 1, "failed": 0} | figures


@pytest.mark.parametrize("width", [80, 100, 260])
def test_the_table_wraps_at_words_within_the_terminal(width):
    """80 columns have the columns that say most; a wide terminal has all. No number is broken."""
    console = Printer(width=width, file=io.StringIO(), soft_wrap=True)
    console.print(result_table([result("float32", 3), result("bfloat16", 3)], console))
    lines = console.file.getvalue().splitlines()
    assert all(cell_len(line) <= width for line in lines)
    words = console.file.getvalue().replace("┃", " ").replace("│", " ").split()
    assert {"0.133", "bfloat16", "amplified", "held-out", "collapsed"} <= {word.strip(",") for word in words}
    assert ("skipped" in words) == (width == 260)


def test_opposite_directions_are_no_effect_of_the_factor():
    (effect,) = (
        e
        for e in effects(
            [
                combination({"x": "1", "y": "1"}, [0.1, 0.15, 0.2]),
                combination({"x": "2", "y": "1"}, [0.8, 0.85, 0.9]),
                combination({"x": "1", "y": "2"}, [0.8, 0.85, 0.9]),
                combination({"x": "2", "y": "2"}, [0.1, 0.15, 0.2]),
            ]
        )
        if e["factor"] == "x"
    )
    assert verdict(effect) == "partly"
    assert "in 1 above and 1 below of 2 comparisons" in effect_line(effect)
    assert effects([]) == []
    assert effects([combination({}, [0.1])]) == []
