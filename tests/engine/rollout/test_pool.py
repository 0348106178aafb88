"""A pool of actors draws what the trainer's own processes draw, whoever of them dies, hangs or is slow.

The actors here are threads; tests/ray has those of a Ray cluster.
"""

import sys
from pathlib import Path

import pytest
from zerokl.cli import main
from zerokl.engine.rollout.pool.actor import SamplerActor, StaleWeightsError
from zerokl.engine.rollout.pool.dispatch import PoolError
from zerokl.engine.runs import run as run_module
from zerokl.engine.runs import samplers
from zerokl.engine.runs.run import train
from zerokl.engine.train.monitor import MismatchError

from tests.thread_actors import ThreadCluster, at_random

LAGGED = {"staleness_schedule": "lagged", "max_staleness": 1}
# Settings of the run, each beside actors that die. The second one has no staleness, and nothing runs ahead.
PRODUCTS = {
    "bfloat16": LAGGED
    | {
        "dtype": "bfloat16",
        "workers": 2,
        "evaluation__every": 1,
        "loss__preset": "grpo",
        "loss__kl_coef": 0.1,
    },
    "on-policy": {"dtype": "float32", "steps": 2, "loss__max_resamples": 2},
    "lagged": LAGGED | {"dtype": "bfloat16", "loss__preset": "grpo"},
    "float16": LAGGED | {"dtype": "float16", "max_staleness": 4, "updates_per_rollout": 2, "steps": 4},
    "perturbed": LAGGED
    | {
        "max_staleness": 2,
        "exact": False,
        "perturb__temperature": 0.9,
        "perturb__top_p": 0.9,
        "perturb__kv": "float8_e4m3fn/token",
        "perturb__logit_noise": 0.1,
        "precision__sampler_dtype": "bfloat16",
    },
    "lora": LAGGED | {"lora__rank": 2, "lora__targets": ("q_proj", "v_proj"), "recompute": "layer"},
    "brpo": LAGGED
    | {
        "loss__preset": "brpo",
        "loss__budgets": (2, 6),
        "loss__answers": 2,
        "task__answer_prefix": ">",
        "sampling__max_tokens": 6,
    },
    "turns": LAGGED
    | {
        "task__name": "acts:echo",
        "task__reward": "",
        "task__options": {},
        "environment__processes": 2,
        "environment__max_turns": 2,
        "evaluation__every": 1,
    },
}
# Actors guess tokens as well, and the trainer's own processes do not.
POOL = {"pool__engine": "ray", "pool__actors": 2, "pool__batch": 3, "native__speculate": 2}


@pytest.fixture(autouse=True)
def _acts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def actors(monkeypatch):
    """actors(**plan): from now on actors are threads, with this plan (see ThreadCluster)."""

    def plan(**kwargs: object) -> None:
        def made(pool, blueprint, kept):
            return ThreadCluster(blueprint, **kwargs)

        monkeypatch.setattr(samplers, "RayCluster", made)
        monkeypatch.setattr(run_module, "require_ray", lambda: None)

    return plan


# The settings of `make test`.
QUICK = ("lagged",)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(x, marks=pytest.mark.full) for x in PRODUCTS if x not in QUICK)]
)
def test_actors_that_die_at_random_change_nothing(config, tmp_path, actors, read_jsonl, name, capsys):
    cfg = config(**PRODUCTS[name])
    expected = train(cfg, tmp_path / "alone")
    actors(befalls=at_random(3))
    pooled = train(config(**PRODUCTS[name], **POOL), tmp_path / "pooled")
    assert (pooled.fingerprint, pooled.weights) == (expected.fingerprint, expected.weights)
    assert pooled.tokens_unequal == expected.tokens_unequal
    metrics = read_jsonl(tmp_path / "pooled" / "metrics.jsonl")
    assert metrics[-1]["pool/replaced"] > 0
    assert "is replaced" in capsys.readouterr().out
    assert all(0 <= m["pool/trainer_idle"] <= 1 and 0 <= m["pool/actors_idle"] <= 1 for m in metrics)
    if name == "lagged":  # a replay draws in its own process
        assert main(["verify", "run", str(tmp_path / "pooled"), "--replays", "1"]) == 0
    ahead = [m["pool/steps_ahead"] for m in metrics]
    assert ahead == [min(cfg.lag, cfg.steps - 1 - step) for step in range(cfg.steps)]


class _Keeps(SamplerActor):
    """Keeps its first weights."""

    copied = False

    def _copy(self, sent):
        if not self.copied:
            super()._copy(sent)
        self.copied = True


class _KeepsAndLies(_Keeps):
    """And says that it has the weights that it was sent."""

    def _load(self, sent, weights):
        self._copy(sent)
        self._sampler.sync_weights(weights.version)
        self._weights = weights


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_stale_weights_end_the_run(config, actors, tmp_path, dtype):
    """By their hash on arrival; and an actor that hides them is found by the bits that it draws."""
    cfg = config(dtype=dtype, **LAGGED, **POOL)
    actors(actor_class=_Keeps)
    with pytest.raises(StaleWeightsError, match="weights of version 1 have the hash"):
        train(cfg, tmp_path / "kept")
    actors(actor_class=_KeepsAndLies)
    with pytest.raises(MismatchError, match="mismatch at step 2"):
        train(cfg, tmp_path / "lied")


class _Other(SamplerActor):
    def greet(self):
        return super().greet() | {"cpu capability": "SSE9"}


class _NoModel(SamplerActor):
    def __init__(self, blueprint):
        raise MemoryError("no room")


class _Older(SamplerActor):
    """Answers for other weights than it was asked for."""

    def generate(self, sent, weights, requests):
        return super().generate(sent, weights, requests[:-1])


def test_what_no_actor_can_draw_ends_the_run_in_one_line(config, actors, tmp_path):
    cfg = config(steps=1, pool__timeout_s=60.0, **POOL)
    plans = [
        ({"befalls": lambda n, lost: "death"}, PoolError, "4 actors ended with the same batch: planned"),
        ({"actor_class": _Other}, ValueError, "has cpu capability 'SSE9', and the trainer '.*alike"),
        ({"actor_class": _NoModel}, PoolError, "actors ended before they drew: no room"),
        ({"actor_class": _Older}, PoolError, "completions for . requests"),
    ]
    for i, (plan, kind, message) in enumerate(plans):
        actors(**plan)
        with pytest.raises(kind, match=message):
            train(cfg, tmp_path / str(i))


@pytest.mark.full
def test_an_actor_that_hangs_is_replaced(config, actors, tmp_path, read_jsonl):
    expected = train(config(steps=2), tmp_path / "alone")
    actors(befalls=lambda n, lost: "hang" if n == 1 else "")
    pooled = train(config(steps=2, pool__timeout_s=3.0, **POOL), tmp_path / "pooled")
    assert pooled.fingerprint == expected.fingerprint
    assert read_jsonl(tmp_path / "pooled" / "metrics.jsonl")[-1]["pool/replaced"] >= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"staleness_schedule": "lagged"}, r"max_staleness \(0\) must be above 0"),
        (
            LAGGED | {"updates_per_rollout": 2},
            r"a multiple of updates_per_rollout \(2\)",
        ),
        (LAGGED | {"perturb__delay": 1, "exact": False}, "both make weights late"),
        ({"max_staleness": 1} | POOL, 'needs staleness_schedule = "lagged"'),
        ({"sampler": "hf", "exact": False} | POOL | {"native__speculate": 0}, 'needs sampler = "native"'),
    ],
)
def test_what_does_not_go_together_is_refused(config, settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_without_ray_a_run_says_what_to_install(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"Ray is not installed; pip install 'ray>=2.50', or"):
        train(config(**POOL), tmp_path / "run")
