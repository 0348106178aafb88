"""Mismatch and staleness are measured separately.

The rollouts are older, of another precision, perturbed, or from an external sampler. A disease is one setting
that makes the sampler differ from the trainer.
"""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zerokl.cli import main
from zerokl.engine.config.config_file import load_config
from zerokl.engine.config.perturb_section import PerturbConfig
from zerokl.engine.config.run_config import Config
from zerokl.engine.rollout.perturb import Delayed, sampled_weights
from zerokl.engine.rollout.types import logit_noise
from zerokl.engine.runs import samplers as samplers_module
from zerokl.engine.runs.run import train
from zerokl.engine.train.monitor import MismatchError
from zerokl.engine.train.parallel.workers import ParallelSampler
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.checkpoint import load_decoder
from zerokl.model.scoring import logprobs, pack
from zerokl.model.weights import FlatLayout

from tests.engine.runs.exact_runs import train_exactly
from tests.helpers import property_settings, total_unequal


def _lines(read_jsonl, run) -> list[dict]:
    return read_jsonl(run / "metrics.jsonl")


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(d, marks=pytest.mark.full) for d in ("float32", "float16"))]
)
def test_older_rollouts_have_mismatch_zero_and_staleness_of_their_own(config, tmp_path, read_jsonl, dtype):
    cfg = config(dtype=dtype, steps=7, max_staleness=2, loss__preset="grpo")
    summary = train_exactly(cfg, tmp_path / "a")
    lines = _lines(read_jsonl, tmp_path / "a")
    assert [m["staleness/versions"] for m in lines] == [0, 1, 2, 0, 1, 2, 0]
    assert [m.get("staleness/max_abs", 0.0) > 0 for m in lines] == [
        False,
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    versions = {r["step"]: r["weight_version"] for r in read_jsonl(tmp_path / "a" / "rollouts.jsonl")}
    assert versions == {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 3, 6: 6}
    again = cfg.model_copy(update={"micro_batch": 2, "workers": 2})
    assert train(again, tmp_path / "b").fingerprint == summary.fingerprint
    fresh = train(config(dtype=dtype, steps=7, loss__preset="grpo"), tmp_path / "fresh")
    assert fresh.weights != summary.weights


def test_several_updates_on_older_rollouts(config, tmp_path, read_jsonl):
    summary = train(config(steps=4, max_staleness=3, updates_per_rollout=2), tmp_path / "run")
    assert summary.mismatch_max_abs == 0.0
    assert [m["staleness/versions"] for m in _lines(read_jsonl, tmp_path / "run")] == [0, 2, 0, 2]


def test_the_logged_staleness_is_that_of_the_logged_rollouts(config, tmp_path, read_jsonl):
    """The checkpoint before a step scores the step's rollouts; compared with the logprobs of sampling."""
    train(config(steps=2, max_staleness=1, checkpoint__every=1), tmp_path / "run")
    decoder = load_decoder(tmp_path / "run" / "checkpoints" / "step-000001", torch.float32)
    rollouts = [r for r in read_jsonl(tmp_path / "run" / "rollouts.jsonl") if r["step"] == 1]
    batch = pack([(r["prompt_ids"], r["completion_ids"]) for r in rollouts])
    with torch.no_grad():
        logp, _ = logprobs(decoder, batch, SamplingParams())
    d = logp.double().numpy() - np.concatenate([r["logprobs"] for r in rollouts])
    metrics = _lines(read_jsonl, tmp_path / "run")[1]
    assert metrics["staleness/max_abs"] == np.abs(d).max() > 0
    assert metrics["staleness/k1"] == pytest.approx(-d.mean(), rel=1e-12)


def test_a_flipped_bit_of_an_older_rollout_is_found_and_its_weights_saved(
    config, tmp_path, monkeypatch, capsys
):
    class Planted(ParallelSampler):
        def generate(self, requests):
            completions = super().generate(requests)
            if requests[0].rng_key.step == 2:
                completions[4].logprobs.view(np.int32)[0] ^= 1
            return completions

    monkeypatch.setattr(samplers_module, "ParallelSampler", Planted)
    with pytest.raises(MismatchError, match=r"step 2, prompt 1, sample 1, position 0 .* 1 ulp apart"):
        train(config(dtype="bfloat16", precision__head_dtype="float32", max_staleness=2), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "mismatch" / "mismatch.json").read_text())["weight_version"] == 0
    saved = load_decoder(tmp_path / "run" / "mismatch", torch.bfloat16)
    assert total_unequal([saved.flat], [load_decoder(config().model, torch.bfloat16).flat]) == 0
    monkeypatch.undo()
    assert main(["verify", "--case", str(tmp_path / "run" / "mismatch")]) == 1
    rows = re.findall(r"(sampler|trainer)'s logprobs.*?(\d+)\D*$", capsys.readouterr().out, re.MULTILINE)
    assert set(rows) == {("sampler", "1"), ("trainer", "0")}


def test_rollouts_older_than_allowed_are_refused(config, tmp_path, monkeypatch):
    class Late(ParallelSampler):
        def generate(self, requests):
            return [dataclasses.replace(c, weight_version=-1) for c in super().generate(requests)]

    monkeypatch.setattr(samplers_module, "ParallelSampler", Late)
    with pytest.raises(ValueError, match="has weight version -1; the trainer is at 1, max_staleness is 1"):
        train(config(max_staleness=1), tmp_path / "run")


DISEASES = {
    "noise": {"perturb__logit_noise": 0.1},
    "rounded": {"perturb__round_weights": "float8_e4m3fn"},
    "amplified": {"perturb__round_weights": "bfloat16", "perturb__gain": 8.0},
    "temperature": {"perturb__temperature": 0.8},
    "delay": {"perturb__delay": 2},
    "dtype": {"precision__sampler_dtype": "bfloat16"},
    "head": {"dtype": "bfloat16", "precision__sampler_head_dtype": "float32"},
    "cache": {"precision__sampler_cache_dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    "name",
    [
        "delay",
        *(pytest.param(x, marks=pytest.mark.full) for x in DISEASES if x != "delay"),
    ],
)
def test_every_disease_shows_as_mismatch_and_is_reproducible(config, tmp_path, read_jsonl, name):
    cfg = config(exact="false", steps=4, loss__preset="tis", **DISEASES[name])
    summary = train(cfg, tmp_path / "a")
    lines = _lines(read_jsonl, tmp_path / "a")
    differs = [m["mismatch/max_abs"] > 0 for m in lines]
    assert differs == ([False, True, True, True] if name == "delay" else [True] * 4)
    assert not any("staleness/k1" in m for m in lines)
    assert {r["weight_version"] for r in read_jsonl(tmp_path / "a" / "rollouts.jsonl")} == {0, 1, 2, 3}
    again = cfg.model_copy(update={"workers": 2, "micro_batch": 2})
    assert train(again, tmp_path / "b").fingerprint == summary.fingerprint
    with pytest.raises(ValueError, match="set exact = false"):
        config(**DISEASES[name])


def test_a_disease_and_staleness_are_told_apart(config, tmp_path, read_jsonl):
    """A fresh step has only mismatch. The mismatch does not grow with the age of the weights."""
    train(
        config(exact="false", steps=4, max_staleness=3, perturb__temperature=0.9, optimizer__lr="3e-2"),
        tmp_path / "run",
    )
    lines = _lines(read_jsonl, tmp_path / "run")
    assert "staleness/k3" not in lines[0]
    assert all(m["mismatch/k3"] < 3 * lines[0]["mismatch/k3"] for m in lines)
    assert lines[3]["staleness/k3"] > 10 * lines[0]["mismatch/k3"], (
        "the policy has moved by far more than the sampler differs"
    )


def test_amplified_rounding_is_rounding_times_the_gain():
    w, layout = torch.linspace(-2, 2, 4096), FlatLayout({"w": ((4096,), (("w.weight", 4096),))})
    rounded, amplified = (
        sampled_weights(Config(perturb=PerturbConfig(round_weights="bfloat16", gain=g)), layout, w)
        for g in (1.0, 8.0)
    )
    assert total_unequal([rounded], [w.bfloat16().float()]) == 0
    assert ((amplified - w) - 8 * (rounded - w)).abs().max() <= 2**-23 * 4
    assert sampled_weights(Config(), layout, w) is w
    assert not PerturbConfig().any


@given(delay=st.integers(0, 4), n=st.integers(1, 9))
def test_delayed_weights_are_those_of_so_many_steps_ago(delay, n):
    delayed, weights = Delayed(delay), torch.zeros(1)
    for i in range(n):
        weights.fill_(i)
        assert delayed.push(weights).item() == max(0, i - delay)


@property_settings(20)
@given(st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_logit_noise_depends_on_its_own_counter_only(seed, step):
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (40, 3, 7)]
    counters = np.array([(*place, step) for place in places])
    noise = logit_noise(seed, counters, 33)
    assert noise.shape == (5, 33)
    for i in range(len(counters)):
        assert total_unequal([noise[i : i + 1]], [logit_noise(seed, counters[i : i + 1], 33)]) == 0
    assert len({tuple(row) for row in noise.tolist()}) == 5
    assert not torch.equal(noise, logit_noise(seed, counters + np.array([0, 0, 0, 1]), 33))


def test_logit_noise_is_standard_normal():
    counters = np.array(list(itertools.product(range(4), range(4), range(4), [0])))
    x = logit_noise(0, counters, 256).double()
    assert abs(x.mean()) < 4 / math.sqrt(x.numel())
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / x.numel())
    assert abs((x > 1.96).double().mean() - 0.025) < 4 * math.sqrt(0.025 / x.numel())


def test_transformers_as_the_sampler(config, tmp_path, read_jsonl):
    cfg = config(sampler="hf", exact="false", steps=20, dtype="bfloat16", loss__preset="tis")
    summary = train(cfg, tmp_path / "run")
    lines = _lines(read_jsonl, tmp_path / "run")
    assert all(0 < m["mismatch/max_abs"] < 0.5 for m in lines), "bf16 rounds elsewhere, by little"
    assert summary.reward_last5 > summary.reward_first + 0.1, "it draws from the weights that are trained"
    rollouts = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    assert [(r["prompt"], r["sample"]) for r in rollouts[:9]] == [(p, g) for p in range(3) for g in range(3)]
    assert [r["weight_version"] for r in rollouts[::9]] == list(range(20))
    assert len({json.dumps(r["completion_ids"]) for r in rollouts[:3]}) > 1, "samples of one prompt differ"


def test_control_transformers_with_old_weights_is_seen(config, tmp_path, read_jsonl, monkeypatch):
    monkeypatch.setattr(
        samplers_module.ExternalSampler,
        "sync_weights",
        lambda self, version: setattr(self, "version", version),
    )
    train(config(sampler="hf", exact="false", steps=3), tmp_path / "run")
    first, _, last = [m["mismatch/max_abs"] for m in _lines(read_jsonl, tmp_path / "run")]
    assert last > 100 * first


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sampler": "hf"}, "set exact = false"),
        ({"perturb.delay": "1"}, "set exact = false"),
        ({"sampler": "hf", "exact": "false", "perturb.logit_noise": "1"}, "has a draw of its own"),
        ({"sampler": "hf", "exact": "false", "precision.sampler_head_dtype": "fp32"}, "numerics of its own"),
        (
            {"sampler": "vllm-zerokl", "exact": "false", "precision.sampler_cache_dtype": "bf16"},
            "cache holds the compute dtype",
        ),
        (
            {"sampler": "vllm-zerokl", "exact": "false", "precision.sampler_router_dtype": "fp32"},
            "routers compute in the compute dtype",
        ),
        ({"perturb.gain": "-1"}, "perturb.gain"),
        ({"perturb.round_weights": "int8"}, "round_"),
        ({"max_staleness": "-1"}, "max_st"),
    ],
)
def test_what_cannot_be_is_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        load_config(None, None, keys)
