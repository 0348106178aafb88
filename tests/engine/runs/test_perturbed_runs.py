"""Runs whose sampler cuts its distribution, or with quantised keys and values, on one side or on both."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from zerokl.cli import main
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.ledger_head import binding
from zerokl.engine.runs.loaded import load_run
from zerokl.engine.runs.run import resume, train
from zerokl.engine.train.monitor import MismatchError
from zerokl.model.numerics import Numerics
from zerokl.verify.compare_runs import open_run

from tests.engine.runs.exact_runs import faults, train_exactly
from tests.helpers import fingerprint
from tests.random_model import EXPERTS, random_model

SET = {
    "perturb": {"top_k": 4, "top_p": 0.7, "min_p": 0.8, "kv": "float8_e4m3fn/unit"},
    "precision": {"kv": "int8/token_head"},
}


@pytest.fixture(scope="module")
def base(model, tmp_path_factory) -> Path:
    return shutil.copytree(model, tmp_path_factory.mktemp("base") / "model")


def first_step(config: Config, path: Path) -> dict[str, Any]:
    train(config, path)
    return open_run(path).lines[0].quantities


def test_the_ledger_chains_a_setting_where_it_is_set_and_only_there(config):
    keys = {f"{section}.{name}": value for section, names in SET.items() for name, value in names.items()}
    assert not binding(config()).keys() & keys.keys()
    for key, value in keys.items():
        with_one = binding(config(exact=False, **{key.replace(".", "__"): value}))
        assert with_one == binding(config()) | {key: value}


# A sampler that cuts


@pytest.mark.parametrize(
    "name", ["top_p", *(pytest.param(n, marks=pytest.mark.full) for n in ("top_k", "min_p"))]
)
def test_it_draws_and_reports_as_a_run_whose_trainer_knows_of_the_cut(config, tmp_path, name):
    value = SET["perturb"][name]
    unknown = first_step(config(steps=1, exact=False, **{f"perturb__{name}": value}), tmp_path / "unknown")
    known = first_step(config(steps=1, **{f"sampling__{name}": value}), tmp_path / "known")
    for quantity in ("tokens", "sampling_logprobs"):
        assert unknown[quantity] == known[quantity]
    assert unknown["trainer_logprobs"] != known["trainer_logprobs"]
    d = [
        t - s
        for line in load_run(tmp_path / "unknown").rollouts()
        for t, s in zip(line["trainer_logprobs"], line["logprobs"], strict=True)
    ]
    assert max(d) <= 0.0, "the sampler gave the rest of the probability to the tokens that are left"
    assert min(d) < -0.1


@pytest.mark.full
def test_a_cut_of_the_sampler_takes_the_place_of_the_trainers(config, tmp_path):
    """top_p = 1 of the sampler alone: it draws tokens to which the trainer gives the probability 0."""
    cfg = config(exact=False, loss__preset="tis", sampling__top_p=0.5, perturb__top_p=1.0)
    train(cfg, tmp_path / "run")
    plain = first_step(config(steps=1), tmp_path / "plain")
    assert open_run(tmp_path / "run").lines[0].quantities["tokens"] == plain["tokens"]
    trainer = [x for line in load_run(tmp_path / "run").rollouts() for x in line["trainer_logprobs"]]
    assert float("-inf") in trainer


# Products of both

RUNS = {
    "cut": {"exact": False, "loss__preset": "tis", "perturb__top_p": 0.8, "perturb__top_k": 20},
    "kv of the sampler": {"exact": False, "perturb__kv": "float8_e5m2/token", "dtype": "bfloat16"},
    "both": {"exact": False, "perturb__kv": "int8/token", "perturb__min_p": 0.8, "max_staleness": 1},
    "kv": {"precision__kv": "float8_e4m3fn/unit", "dtype": "float16"},
}


@pytest.fixture(
    scope="module", params=[pytest.param(RUNS[name], id=name, marks=pytest.mark.full) for name in RUNS]
)
def settings(request) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module")
def run(settings, config, base, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("perturbed") / "run"
    summary = train(config(model=base, checkpoint__every=2, **settings), path)
    assert (summary.tokens_unequal == 0) == ("precision__kv" in settings)
    return path


@pytest.mark.parametrize(
    "cut_up",
    [
        {"workers": 2, "micro_batch": 2, "native__max_concurrency": 3},
        {"shards_in_flight": 3, "micro_batch": 5, "recompute": "layer", "native__max_batch_tokens": 2},
    ],
    ids=str,
)
def test_how_the_work_is_cut_decides_no_bit(settings, run, config, base, tmp_path, cut_up):
    train(config(model=base, checkpoint__every=2, **settings, **cut_up), tmp_path / "run")
    assert fingerprint(tmp_path / "run") == fingerprint(run)


def test_a_run_is_verified_replayed_reported_and_goes_on(settings, run, cut, tmp_path):
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    if "max_staleness" in settings:
        return  # no checkpoint has the older weights
    assert faults(cut) == []
    assert main(["replay", str(cut), "--step", "1", "--trace", str(tmp_path / "t.safetensors")]) == 0
    resume(cut, {"workers": 2})
    assert [line.chain for line in open_run(cut).lines] == [line.chain for line in open_run(run).lines]


# Quantised keys and values of both sides


@pytest.mark.parametrize(
    ("dtype", "kv"),
    [
        ("bfloat16", "float8_e4m3fn/unit"),
        pytest.param("float32", "int8/token_head", marks=pytest.mark.full),
        pytest.param("float16", "float8_e5m2/token/pow2", marks=pytest.mark.full),
    ],
)
def test_both_sides_are_exact_and_the_sampler_alone_draws_the_same(config, tmp_path, dtype, kv):
    train_exactly(config(dtype=dtype, steps=2, precision__kv=kv), tmp_path / "both")
    alone = first_step(config(dtype=dtype, steps=1, exact=False, perturb__kv=kv), tmp_path / "alone")
    both = open_run(tmp_path / "both").lines[0].quantities
    assert (alone["tokens"], alone["sampling_logprobs"]) == (both["tokens"], both["sampling_logprobs"])
    assert alone["trainer_logprobs"] != both["trainer_logprobs"]
    assert load_run(tmp_path / "alone").metrics["mismatch/k3"][0] > 0


@pytest.mark.full
def test_control_a_decode_that_does_not_round_is_seen(config, tmp_path, monkeypatch):
    monkeypatch.setattr(Numerics, "cache_rounds_once", lambda *_: True)
    with pytest.raises(MismatchError):
        train(config(steps=1, precision__kv="float8_e5m2/unit"), tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        {"lora__rank": 2, "dtype": "bfloat16"},
        {"parallel__engine": "fsdp", "recompute": "layer"},
        {"max_staleness": 1, "updates_per_rollout": 2, "loss__kl_coef": 0.1},
        {"max_staleness": 1, "staleness_schedule": "lagged", "dtype": "float16"},
        {"precision__weights": "float8_e4m3fn/block32", "frozen": ("model.layers.0.*",)},
        {"loss__preset": "ppo"},
        {"model": "experts"},
    ],
    ids=str,
)
def test_both_sides_are_exact_with(config, tmp_path, more):
    if more.get("model") == "experts":
        more = {"model": random_model(tmp_path, EXPERTS)}
    train_exactly(config(precision__kv="float8_e4m3fn/token_head", **more), tmp_path / "run")
    if "loss__kl_coef" in more:
        assert load_run(tmp_path / "run").metrics["ref/k3"][0] == 0.0, "the reference rounds alike"


KV = {"precision__kv": "int8/token"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"perturb__top_p": 0.9}, "set exact = false"),
        ({"perturb__kv": "int8/token"}, "set exact = false"),
        (KV | {"precision__cache_dtype": "bfloat16"}, "each rounds keys and values; leave one out"),
        ({"perturb__min_p": 0.1, "sampler": "hf", "exact": False}, "or with perturb.min_p: transformers"),
        ({"perturb__kv": "int8/token", "sampler": "hf", "exact": False}, "has a cache of its own"),
        (KV | {"sampler": "vllm-exact"}, 'leave them out, or set sampler = "vllm-zerokl"'),
        ({"precision__kv": "int8/unit"}, "precision.kv.*with the scale 1 an int8 is a whole number"),
        ({"perturb__kv": "int8/tensor"}, "perturb.kv.*SCALE one of unit, token, token_head"),
    ],
)
def test_refusals(config, settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


@pytest.mark.full
def test_transformers_draws_from_the_cut_distribution(config, tmp_path):
    cfg = config(steps=1, exact=False, sampler="hf", perturb__top_k=2)
    train(cfg, tmp_path / "run")
    assert load_run(tmp_path / "run").metrics["mismatch/k1"][0] > 0.5
