"""Runs that measure the gradient's bias end with the same bits, and what they measure has bits of its own."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from zerokl.cli import main
from zerokl.engine.config.compatibility import check_settings
from zerokl.engine.config.config_file import to_toml
from zerokl.engine.runs.run import resume, train
from zerokl.engine.train.losses.corrected import CORRECTED, MEASURED

from tests.forked import run_ranks
from tests.random_model import EXPERTS, ONE_LAYER, random_model

LATE = {"perturb__temperature": 1.3, "exact": False}
# Products with the monitor: how the rollouts come about, and what the loss is.
RUNS: dict[str, dict[str, Any]] = {
    "native": LATE,
    "hf": {"sampler": "hf", "exact": False},
    "float16": LATE | {"dtype": "float16", "precision__scale": 1024.0},
    "workers": LATE | {"workers": 2, "updates_per_rollout": 2},
    "stale": {"max_staleness": 1, "loss__preset": "tis"},
    "lagged": LATE | {"max_staleness": 1, "staleness_schedule": "lagged"},
    "delay": {"perturb__delay": 1, "exact": False},
    "quantised": {"perturb__weights": "int8/row", "exact": False, "lora__rank": 2},
    "frozen": LATE | {"frozen": ["model.embed_tokens.*"]},
    "critic": LATE | {"loss__preset": "ppo"},
    "resampled": LATE | {"loss__preset": "dapo", "loss__max_resamples": 2, "loss__kl_coef": 0.1},
    "budgets": LATE
    | {"loss__preset": "brpo", "loss__budgets": [3, 8], "loss__answers": 2, "task__answer_prefix": "="},
    "turns": LATE
    | {
        "task__name": "nim",
        "task__options": {},
        "task__reward": "",
        "prompts": 4,
        "loss__overlong_share": 1.0,  # a model of random weights earns nothing else
    },
}
# In `make test` the first one is run; the others of these with the rest, and all in a proof.
MARKS = {"native": []} | dict.fromkeys(("hf", "critic", "turns"), pytest.mark.full)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return random_model(tmp_path_factory.mktemp("small"), ONE_LAYER, 2.0)


@pytest.fixture(scope="module")
def make(config, small, tmp_path_factory) -> Callable[..., Path]:
    """make(**overrides): the folder of a run of the small model."""

    def make(**overrides: Any) -> Path:
        path = tmp_path_factory.mktemp("runs") / "run"
        train(config(**{"model": small, "tracking": [], **overrides}), path)
        return path

    return make


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def measured(line: dict[str, Any]) -> dict[str, Any]:
    """What a line of metrics.jsonl has of the gradient."""
    return {name: x for name, x in line.items() if name.startswith("gradient/")}


def ended(run: Path) -> list[object]:
    """The fingerprint and the weights of a run, and its metrics except times and the gradient's."""
    summary = json.loads((run / "summary.json").read_text())
    groups = ("gradient/", "time/", "perf/")
    kept = [{k: x for k, x in line.items() if not k.startswith(groups)} for line in lines(run)]
    return [summary["fingerprint"], summary["weights"], kept]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.proof)) for name in RUNS]
)
def test_a_run_with_the_monitor_ends_with_the_bits_of_one_without(make, name):
    without, beside = make(**RUNS[name]), make(**RUNS[name], monitor__gradient=2)
    assert ended(beside) == ended(without)
    first, second, third = map(measured, lines(beside))
    assert not second
    assert first.keys() == third.keys()
    assert first != third
    assert not any(map(measured, lines(without)))
    figures = {f"gradient/cosine_{loss}" for loss in (*MEASURED, "floor")}
    assert figures <= first.keys()
    assert all(x is not None for x in first.values())
    # The measured loss "own" is what the first update minimises.
    if RUNS[name].get("updates_per_rollout", 1) == 1:
        assert first["gradient/norm_own"] == pytest.approx(lines(beside)[0]["grad_norm"], rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize(
    "spread",
    [
        {"micro_batch": 1, "shards_in_flight": 2, "threads": 2, "workers": 1},
        {"workers": 2, "native__max_concurrency": 2},
    ],
)
def test_how_the_work_is_spread_decides_no_bit_of_what_is_measured(make, spread):
    runs = [make(**LATE, steps=1, monitor__gradient=1, **chosen) for chosen in ({}, spread)]
    alone, other = (measured(lines(run)[0]) for run in runs)
    assert alone == other


@pytest.mark.proof
def test_ranks_decide_no_bit_of_what_is_measured(make, config, small, tmp_path):
    chosen = LATE | {"steps": 2, "monitor__gradient": 1, "virtual_shards": 4}
    alone = make(**chosen)
    (tmp_path / "run.toml").write_text(to_toml(config(model=small, tracking=[], **chosen)))
    words = ["-m", "zerokl", "train", str(tmp_path / "run.toml"), "--run_dir", str(tmp_path / "run")]
    run_ranks(2, words, tmp_path)
    assert ended(tmp_path / "run") == ended(alone)
    assert [measured(line) for line in lines(tmp_path / "run")] == [measured(line) for line in lines(alone)]


@pytest.mark.full
def test_a_sampler_without_a_mismatch_has_one_gradient_under_every_correction(make):
    first = measured(lines(make(exact=False, steps=1, monitor__gradient=1))[0])
    for figure in ("cosine", "distance", "inner", "norm"):
        assert len({first[f"gradient/{figure}_{name}"] for name in MEASURED}) == 1
    for layer in first["gradient/layers"].values():
        assert len({json.dumps(layer[name]) for name in CORRECTED}) == 1


@pytest.mark.full
def test_a_resumed_run_measures_the_same_and_a_replay_finds_it_so(make, tmp_path):
    chosen = LATE | {"monitor__gradient": 2, "checkpoint__every": 1}
    whole = make(**chosen)
    part = make(**chosen | {"steps": 2})
    resume(part, {"steps": 3})
    assert [measured(line) for line in lines(part)] == [measured(line) for line in lines(whole)]
    assert main(["verify", "run", str(part), "--replays", "1", "--draw", "0"]) == 0
    # A measurement that was altered is found: the steps done again do not have it.
    text = (part / "metrics.jsonl").read_text()
    name = '"gradient/cosine_own": '
    (part / "metrics.jsonl").write_text(text.replace(name, f"{name}1", 1))
    assert main(["verify", "run", str(part), "--replays", "3", "--draw", "0"]) == 1


@pytest.mark.proof
def test_replayed_experts(make, tmp_path_factory):
    model = random_model(tmp_path_factory.mktemp("experts"), EXPERTS | ONE_LAYER | {"mlp_only_layers": []})
    chosen = LATE | {"model": model, "perturb__routing": "replayed", "steps": 2}
    assert ended(make(**chosen, monitor__gradient=1)) == ended(make(**chosen))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "monitor.gradient (1) with exact = true: every rollout is exact, so its gradient has no bias"),
        (
            {"loss__preset": "verifree", "task__answer_prefix": "=", "task__reward": "", "exact": False},
            "with a loss of given tokens",
        ),
        ({"parallel__engine": "fsdp", "exact": False}, '"fsdp") with monitor.gradient (1)'),
    ],
)
def test_what_cannot_be_measured_is_refused(config, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_settings(config(monitor__gradient=1, **settings), "cpu")
