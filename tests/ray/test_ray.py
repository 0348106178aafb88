"""Runs whose rollouts actors of a Ray cluster draw have the ledger of a run of one process."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
from zerokl.cli import main
from zerokl.engine.config.config_file import load_config, to_toml
from zerokl.engine.config.run_config import Config
from zerokl.engine.rollout.pool.actor import SamplerActor, StaleWeightsError
from zerokl.engine.rollout.pool.on_ray import RayCluster
from zerokl.engine.runs import samplers
from zerokl.engine.runs.run import resume, train

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the nodes do not have the tests


@pytest.fixture(scope="module")
def pool(cluster) -> dict[str, object]:
    return {
        "pool.engine": "ray",
        "pool.address": cluster.address,
        "pool.actors": 2,
        "pool.batch": 2,
        "pool.timeout_s": 120.0,
    }


class Killer(threading.Thread):
    """Kills an actor's process with SIGKILL at a random moment of step 1, and another's in step 2.

    log: the run's metrics. pids: of the actors, as they start.
    """

    def __init__(self, log: Path, seed: int, pids: list[int]):
        super().__init__(daemon=True)
        self._log, self._pids, self._draw, self.killed = log, pids, random.Random(seed), 0

    def run(self) -> None:
        while self.killed < 2:
            lines = self._log.read_text().count("\n") if self._log.exists() else 0
            if lines <= self.killed or len(self._pids) <= self.killed:
                time.sleep(0.005)
                continue
            time.sleep(self._draw.uniform(0.0, 0.1))
            os.kill(self._pids[self.killed], signal.SIGKILL)
            self.killed += 1


def known(monkeypatch: pytest.MonkeyPatch, actor_class: type = SamplerActor) -> list[int]:
    """The process ids of the actors that runs start from now on, in the order in which they are ready."""
    pids: list[int] = []

    class Known(RayCluster):
        def __init__(self, config, blueprint, kept):
            super().__init__(config, blueprint, kept, actor_class)

        def start(self):
            actor = super().start()
            future = actor.__ray_call__.remote(lambda self: os.getpid()).future()
            future.add_done_callback(lambda done: done.exception() or pids.append(done.result()))
            return actor

    monkeypatch.setattr(samplers, "RayCluster", Known)
    return pids


PRODUCTS = {
    "bfloat16, workers, evaluation": {"dtype": "bfloat16", "steps": 8, "workers": 2},
    "float16, two updates": {
        "dtype": "float16",
        "steps": 5,
        "max_staleness": 4,
        "updates_per_rollout": 2,
        "loss.preset": "grpo",
    },
    "float32, trajectories of turns": {
        "dtype": "float32",
        "steps": 5,
        "task.name": "acts:echo",
        "task.reward": "",
        "task.options": {},
        "environment.max_turns": 2,
        "environment.processes": 1,
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.proof if x.startswith("float16") else ()) for x in PRODUCTS]
)
def test_actors_killed_at_random_moments_change_nothing(base, pool, tmp_path, read_lines, monkeypatch, name):
    settings = base | PRODUCTS[name]
    expected = train(load_config(None, None, settings), tmp_path / "alone")
    killer = Killer(tmp_path / "pooled" / "metrics.jsonl", 5, known(monkeypatch))
    killer.start()
    pooled = train(load_config(None, None, settings | pool), tmp_path / "pooled")
    assert (pooled.fingerprint, pooled.weights) == (expected.fingerprint, expected.weights)
    assert (pooled.mismatch_max_abs, pooled.tokens_unequal) == (0.0, 0)
    assert killer.killed == 2
    # Who was killed without work is replaced when there is some.
    assert read_lines(tmp_path / "pooled" / "metrics.jsonl")[-1]["pool/replaced"] >= 1
    assert main(["diff", str(tmp_path / "alone"), str(tmp_path / "pooled")]) == 0


class Keeps(SamplerActor):
    """Keeps its first weights."""

    copied = False

    def _copy(self, sent):
        if not self.copied:
            SamplerActor._copy(self, sent)
        self.copied = True


def test_a_stale_copy_on_an_actor_ends_the_run(base, pool, tmp_path, monkeypatch):
    known(monkeypatch, Keeps)
    with pytest.raises(StaleWeightsError, match="weights of version 1 have the hash"):
        train(load_config(None, None, base | pool | {"steps": 3, "pool.actors": 1}), tmp_path / "run")


def _killed_after(config: Config, folder: Path, step: int) -> None:
    """A run in a process of its own, with a cluster of its own, that is killed when `step` steps are done."""
    (folder / "run.toml").write_text(to_toml(config))
    words = ["-m", "zerokl", "train", str(folder / "run.toml"), "--run_dir", str(folder / "run")]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, cwd=folder)
    checkpoint = folder / "run" / "checkpoints" / f"step-{step:06d}"
    while process.poll() is None and not checkpoint.exists():
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_a_run_whose_driver_was_killed_goes_on_with_other_actors(base, pool, tmp_path):
    settings = base | {"steps": 8, "max_staleness": 2, "checkpoint.every": 1, "dtype": "bfloat16"}
    expected = train(load_config(None, None, settings), tmp_path / "alone")
    driver = pool | {"pool.address": "", "pool.actors": 1, "pool.cpus": 0.5}
    _killed_after(load_config(None, None, settings | driver), tmp_path, 3)
    overrides = {key: str(value) for key, value in pool.items()}
    assert resume(tmp_path / "run", overrides).fingerprint == expected.fingerprint
    assert main(["verify", "run", str(tmp_path / "run"), "--replays", "1"]) == 0


def test_a_cluster_that_is_not_there_is_refused(base, pool, tmp_path):
    with pytest.raises(ValueError, match=r"pool.address \('127.0.0.1:9'\): no Ray cluster there"):
        train(
            load_config(None, None, base | pool | {"pool.address": "127.0.0.1:9", "steps": 1}),
            tmp_path / "run",
        )
