"""`zerokl ablate`: every cell is a run, ended runs are kept, the report says what the runs' files say."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zerokl
from zerokl.cli import main
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.runs.ablations.ablate import ablate, read_grid
from zerokl.engine.runs.ablations.cells import CellRun
from zerokl.engine.runs.ablations.effects import LEAST_SEEDS
from zerokl.engine.runs.ablations.figures import collapse_step, spread
from zerokl.engine.runs.run import train
from zerokl.files.writing import hold_folder

GRID = """
file = "{base}"
seeds = [0, 1]
[set]
steps = 2
[set.evaluation]
every = 1
[grid]
dtype = ["float32", "float16"]
loss.preset = ["pg", "gspo"]
[variants.scale]
one = {{ }}
huge = {{ "precision.scaling" = "static", "precision.scale" = 1e9 }}
"""


@pytest.fixture
def grid(config, tmp_path):
    """grid(text): write a grid file over the tests' configuration; returns its path."""
    (tmp_path / "base.toml").write_text(to_toml(config(evaluation__problems=7)))

    def write(text: str) -> Path:
        (tmp_path / "grid.toml").write_text(text.format(base=tmp_path / "base.toml"))
        return tmp_path / "grid.toml"

    return write


def test_a_grid_is_every_combination_with_every_seed(grid):
    cells = read_grid(grid(GRID.replace("1e9", "1073741824.0")))
    assert len(cells) == 2 * 2 * 2 * 2
    assert cells[0].folder == "dtype=float32,preset=pg,scale=one/seed-0"
    first, last = cells[0].config, cells[-1].config
    assert cells[-1].settings == {"dtype": "float16", "loss.preset": "gspo", "scale": "huge"}
    assert (last.dtype, last.loss.preset, last.seed) == ("float16", "gspo", 1)
    assert (last.precision.scale, first.precision.scale) == (2.0**30, 65536.0)
    assert {(c.config.steps, c.config.evaluation.every) for c in cells} == {(2, 1)}
    assert {c.config.evaluation.problems for c in cells} == {7}, (
        "a key of a section that the grid does not set keeps its value of the file"
    )


def test_the_sanity_test_is_a_valid_grid():
    cells = read_grid(Path(zerokl.__file__).parent / "benchmarks" / "sanity_test.toml")
    assert len(cells) == 3 * 4 * 3 * 3
    assert {c.config.exact for c in cells if c.settings["perturb"] == "exact"} == {True}
    assert {c.config.exact for c in cells if c.settings["perturb"] != "exact"} == {False}
    assert len({to_toml(c.config) for c in cells}) == len(cells)


def test_the_precision_recipe_has_what_its_question_needs():
    """An exact control, a correction axis, three seeds, and the held-out accuracy."""
    cells = read_grid(Path(zerokl.__file__).parent / "benchmarks" / "precision.toml")
    settings = [cell.settings for cell in cells]
    assert {c.config.exact for c in cells if c.settings["sampler"] == "exact"} == {True}
    assert {c.config.loss.correction for c in cells if c.settings["correction"] == "none"} == {"none"}
    assert all(settings.count(s) >= LEAST_SEEDS for s in settings)
    assert all(c.config.evaluation.every for c in cells)
    assert len({to_toml(c.config) for c in cells}) == len(cells)


def test_the_recipe_of_adapters_compares_ranks_with_all_weights():
    cells = read_grid(Path(zerokl.__file__).parent / "benchmarks" / "lora.toml")
    ranks = {cell.settings["trained"]: cell.config.lora.rank for cell in cells}
    assert ranks == {"all_weights": 0, "rank_16": 16, "rank_1": 1}
    assert all(c.config.exact and c.config.evaluation.every for c in cells)
    assert len({to_toml(c.config) for c in cells}) == len(cells) == 3 * LEAST_SEEDS


@pytest.mark.full
def test_cells_are_ordinary_runs_and_the_report_sums_them_up(grid, tmp_path, read_jsonl, capsys):
    path = grid(
        'file = "{base}"\nseeds = [0, 3]\n[set]\nsteps = 3\nevaluation.every = 2\n'
        '[grid]\nloss.preset = ["pg", "gspo"]\n'
    )
    assert main(["ablate", str(path), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "gspo" in printed
    assert f"figures {tmp_path / 'out' / 'ablation.json'}" in printed
    assert (tmp_path / "out" / "report.html").exists()
    report = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert [c["settings"] for c in report["combinations"]] == [{"loss.preset": "pg"}, {"loss.preset": "gspo"}]
    for cell in read_grid(path):
        run = tmp_path / "out" / "cells" / cell.folder
        plain = train(cell.config, tmp_path / "plain" / cell.folder)
        assert json.loads((run / "summary.json").read_text())["fingerprint"] == plain.fingerprint
        lines = read_jsonl(run / "metrics.jsonl")
        combination = next(c for c in report["combinations"] if c["settings"] == cell.settings)
        (reported,) = [r for r in combination["runs"] if r["seed"] == cell.config.seed]
        rewards = [m["reward/mean"] for m in lines]
        assert reported["reward_last10"] == pytest.approx(sum(rewards) / len(rewards))
        assert (reported["reward_best"], reported["reward_last"]) == (max(rewards), rewards[-1])
        assert reported["fingerprint"] == plain.fingerprint
        assert (reported["mismatch_k3_mean"], reported["mismatch_max_abs"]) == (0.0, 0.0)
        assert (reported["skipped_steps"], reported["error"]) == (0, None)
        assert reported["held_out_last"] == lines[-1]["eval/reward"]
        assert reported["seconds"] > 0
    table, effects = (tmp_path / "out" / "ablation.md").read_text().split("\n\n")
    headings, _, *rows = ([cell.strip() for cell in line.split(" | ")] for line in table.splitlines())
    assert [dict(zip(headings, row, strict=True))["| loss.preset"] for row in rows] == ["| pg", "| gspo"]
    assert all(line.startswith("- loss.preset: gspo against pg, ") for line in effects.splitlines())
    for c in report["combinations"]:
        last_rewards = [r["reward_last"] for r in c["runs"]]
        mean = pytest.approx(sum(last_rewards) / 2)
        assert c["reward_last"] == {"mean": mean, "min": min(last_rewards), "max": max(last_rewards)}
        assert [p["step"] for p in c["by_step"]["reward/mean"]] == [0, 1, 2]
        assert [p["step"] for p in c["by_step"]["eval/reward"]] == [0, 2, 3]


@pytest.mark.full
def test_ended_runs_are_kept_and_interrupted_ones_go_on(grid, tmp_path, monkeypatch):
    path, out = grid('file = "{base}"\nseeds = [0, 1, 2]\n[set]\nsteps = 2\n'), tmp_path / "out"
    first, seeds_run = ablate(path, out), []
    (out / "cells" / "run" / "seed-1" / "summary.json").unlink()
    start = CellRun.start

    def counted(run, *args):
        seeds_run.append(run.cell.config.seed)
        start(run, *args)

    monkeypatch.setattr(CellRun, "start", counted)
    again = ablate(path, out)
    assert seeds_run == [1]
    before, after = (
        [r["fingerprint"] for r in report["combinations"][0]["runs"]] for report in (first, again)
    )
    assert before == after
    assert len(set(before)) == 3, "the seeds give different runs"


@pytest.mark.full
def test_a_run_that_ends_by_itself_is_a_result(grid, tmp_path):
    keys = 'dtype = "float16"\noptimizer.lr = 1e6\nsteps = 6\n'
    path = grid('file = "{base}"\nseeds = [0]\n[set]\n' + keys + '[grid]\nloss.preset = ["pg"]\n')
    out = tmp_path / "out"
    (combination,) = ablate(path, out)["combinations"]
    assert combination["failed"] == 1
    (run,) = combination["runs"]
    assert "logits of prompt" in run["error"]
    assert run["steps"] < 6
    (again,) = ablate(path, out)["combinations"][0]["runs"]
    assert json.dumps(again) == json.dumps(run), "the result is kept; NaN is as it was"


@pytest.mark.full
def test_a_cell_that_fails_is_named_and_ends_no_other(grid, tmp_path, capsys):
    rewards = '["toy:letters", "toy:broken", "toy:nothing"]'
    path = grid(f'file = "{{base}}"\nseeds = [0]\n[set]\nsteps = 1\n[grid]\ntask.reward = {rewards}\n')
    out = tmp_path / "out"
    assert main(["ablate", str(path), "--out", str(out), "--jobs", "2"]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert "ablate: reward=toy:broken/seed-0 (and 1 more) failed: reward: raised RuntimeError" in line
    report = json.loads((out / "ablation.json").read_text())
    assert [c["settings"]["task.reward"] for c in report["combinations"]] == ["toy:letters"]
    assert list(report["failures"]) == ["reward=toy:broken/seed-0", "reward=toy:nothing/seed-0"]
    assert "raised RuntimeError" in (out / "cells" / "reward=toy:broken" / "seed-0.log").read_text()
    assert "reward=toy:broken/seed-0 failed: reward: raised RuntimeError" in printed.out


@pytest.mark.full
def test_a_process_that_is_killed_is_a_failure(grid, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    report = ablate(grid('file = "{base}"\nseeds = [0]\n[set]\nsteps = 1\n'), tmp_path / "killed")
    (reason,) = report["failures"].values()
    assert reason.startswith("its process ended with exit code 1; see ")
    assert report["combinations"] == []


@pytest.mark.full
def test_cells_side_by_side_have_the_same_bits(grid, tmp_path):
    path = grid(
        'file = "{base}"\nseeds = [0, 1]\n[set]\nsteps = 3\ncheckpoint.every = 2\nworkers = 0\n'
        '[grid]\ndtype = ["float32", "bfloat16"]\n'
    )
    folders = {jobs: tmp_path / f"jobs-{jobs}" for jobs in (1, 3)}
    for jobs, out in folders.items():
        ablate(path, out, jobs)
    for cell in read_grid(path):
        one, three = (out / "cells" / cell.folder for out in folders.values())
        assert _decided(one) == _decided(three)


def _decided(run: Path) -> dict[str, object]:
    """All that the law decides of a run: its ledger without the environment, its tokens and its weights."""
    head, *lines = map(json.loads, (run / "ledger.jsonl").read_text().splitlines())
    head.pop("environment")
    names = ("rollouts.jsonl", "checkpoints/step-000003/model.safetensors")
    return {"head": head, "lines": lines} | {name: (run / name).read_bytes() for name in names}


@pytest.mark.full
def test_ctrl_c_ends_all_cells_and_the_same_command_goes_on(grid, tmp_path, capsys):
    text = 'file = "{base}"\nseeds = [0, 1]\n[set]\nsteps = 400\ncheckpoint.every = 2\n'
    path, out = grid(text), tmp_path / "out"
    command = [sys.executable, "-m", "zerokl", "ablate", str(path), "--out", str(out), "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    cells = [out / "cells" / "run" / f"seed-{seed}" for seed in (0, 1)]
    while not all((cell / "checkpoints" / "step-000004").exists() for cell in cells):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"the same command goes on" in printed
    assert error == b"zerokl: interrupted\n"
    for cell in cells:
        with hold_folder(cell):  # no process writes to it any more
            assert not (cell / "summary.json").exists()
    (path).write_text(path.read_text().replace("steps = 400", "steps = 401"))
    assert main(["ablate", str(path), "--out", str(out)]) == 2
    assert "holds a run of another configuration" in capsys.readouterr().err


@pytest.mark.full
def test_an_interrupted_cell_goes_on_from_its_checkpoint(grid, tmp_path, capsys):
    path = grid('file = "{base}"\nseeds = [0]\n[set]\nsteps = 4\ncheckpoint.every = 2\n')
    first = ablate(path, tmp_path / "whole")
    out = tmp_path / "cut"
    shutil.copytree(tmp_path / "whole", out)
    run = out / "cells" / "run" / "seed-0"
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-000004")
    capsys.readouterr()
    again = ablate(path, out)
    assert "1 of them, interrupted before, go on" in capsys.readouterr().out
    assert "going on at step 2 of 4" in (out / "cells" / "run" / "seed-0.log").read_text()
    fingerprints = [report["combinations"][0]["runs"][0]["fingerprint"] for report in (first, again)]
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.full
def test_another_grid_in_the_same_folder_is_refused(grid, tmp_path):
    text = 'file = "{base}"\nseeds = [0]\n[set]\nsteps = 1\n'
    ablate(grid(text), tmp_path / "out")
    with pytest.raises(ValueError, match="holds a run of another configuration; choose another --out"):
        ablate(grid(text.replace("steps = 1", "steps = 2")), tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = = 1", "is not valid TOML"),
        ("sedes = [1]", "unknown key sedes; keys are"),
        ("seeds = []", "must be a list of different"),
        ("seeds = [1, 1]", "different numbers"),
        ("[grid]\ndtype = 'float32'", "grid.dtype .* must be a list"),
        ("[grid]\ndtype = ['float8']", "combination dtype=float8: config: dtype"),
        ("[grid]\nstep = [1]", "combination step=1: config: unknown key step; did you mean steps"),
        ("[grid]\nsteps = [1, 1]", "one value twice"),
        ("[variants]\na = 3", "variants.a must hold a table"),
        ("preset = 'none'", "preset none is not known"),
        ("seeds = [-1]", "combination run: config: seed"),
    ],
)
def test_a_bad_grid_is_refused_in_one_line_before_anything_runs(tmp_path, capsys, text, message):
    (tmp_path / "grid.toml").write_text(text)
    assert main(["ablate", str(tmp_path / "grid.toml"), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()


def test_a_grid_that_is_not_there_and_an_out_that_is_missing(tmp_path, capsys):
    assert main(["ablate", str(tmp_path / "none.toml"), "--out", "x"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["ablate", str(tmp_path / "none.toml")]) == 2
    assert "--out is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.1, 0.5, 1.0, 0.9, 0.8], None),
        ([0.1, 1.0, 0.7, 0.85, 0.2, 0.79], 4),
        ([1.0, 0.1], 1),
        ([0.0, 0.0], None),
        ([], None),
        ([-1.0, -2.0], None),
        ([0.2, 1.0, 0.0, 0.0, 0.9], None),
    ],
)
def test_a_collapse_is_a_fall_for_good(rewards, step):
    assert collapse_step(rewards) == step


def test_spread_leaves_out_what_is_not_there():
    assert spread([1.0, math.nan, 3.0]) == {"mean": 2.0, "min": 1.0, "max": 3.0}
    assert all(math.isnan(v) for v in spread([math.nan]).values())
