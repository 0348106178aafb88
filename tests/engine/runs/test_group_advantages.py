"""Runs whose advantages need more of a group than its rewards."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from zerokl.cli import main
from zerokl.engine.runs.loaded import load_run
from zerokl.engine.runs.run import resume, train
from zerokl.engine.train.losses.advantage import advantages

from tests.engine.runs.exact_runs import train_exactly


def test_pass_at_k_trains_on_a_binary_reward_with_the_advantages_of_its_log(config, read_jsonl, tmp_path):
    train_exactly(config(loss__preset="pass_at_k", num_generations=5, loss__k=3), tmp_path / "run")
    rollouts = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    rewards, A = (np.array([r[key] for r in rollouts]).reshape(9, 5) for key in ("reward", "advantage"))
    assert (advantages(rewards, "pass_at_k", k=3) == A).all()
    assert A.any()
    assert (advantages(rewards, "pass_at_k", k=2) != A).any(), "control: k must show"


def test_pass_at_k_refuses_a_reward_that_may_be_graded_before_the_first_step(config, tmp_path):
    message = (
        r'loss.advantage \("pass_at_k"\): the reward of task add does not say that it is 0 or 1; set `binary'
    )
    with pytest.raises(ValueError, match=message):
        train(config(loss__preset="pass_at_k", task__reward="toy:letters"), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


SEED = {"loss__preset": "seed_grpo", "task__equivalence": "toy:as_many_letters", "num_generations": 4}


@pytest.fixture(scope="module")
def seed_grpo(config, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("seed") / "run"
    train_exactly(config(**SEED), path)
    return path


def test_the_advantages_of_a_group_are_scaled_by_the_entropy_of_its_meanings(seed_grpo, read_jsonl):
    rollouts = read_jsonl(seed_grpo / "rollouts.jsonl")
    metrics = read_jsonl(seed_grpo / "metrics.jsonl")
    entropies = []
    for i in range(0, len(rollouts), 4):
        group = rollouts[i : i + 4]
        meanings = Counter(sum(c.isalpha() for c in r["text"]) for r in group)
        entropies.append(-sum(n / 4 * math.log(n / 4) for n in meanings.values()))
        mean = sum(r["reward"] for r in group) / 4
        for r in group:
            expected = (r["reward"] - mean) * (1 - 0.5 * entropies[-1] / math.log(4))
            assert r["advantage"] == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert len(set(entropies)) > 1, "control: groups must differ in their entropies"
    for step, m in enumerate(metrics):
        assert m["groups/semantic_entropy"] == pytest.approx(sum(entropies[3 * step : 3 * step + 3]) / 3)


def test_a_run_with_an_equivalence_is_done_again_to_the_bit(seed_grpo, config, tmp_path, capsys):
    assert main(["verify", "run", str(seed_grpo), "--replays", "1", "--draw", "0"]) == 0, capsys.readouterr()
    other = train(config(**SEED, task__reward_processes=2, micro_batch=1), tmp_path / "cut otherwise")
    assert other.fingerprint == json.loads((seed_grpo / "summary.json").read_text())["fingerprint"]
    by_text = train(config(**SEED | {"task__equivalence": ""}), tmp_path / "by text")
    assert by_text.weights != other.weights, "control: what means the same must show"


def test_an_equivalence_that_raises_ends_the_run_with_one_line(config, tmp_path):
    with pytest.raises(ValueError, match=r"^equivalence: raised KeyError \('missing'\) for prompt \d+ \("):
        train(config(**SEED | {"task__equivalence": "toy:no_meaning"}), tmp_path / "run")


@pytest.mark.full
def test_a_folder_that_lacks_the_rare_settings_is_read_and_goes_on(config, tmp_path):
    path, cfg = tmp_path / "run", config(steps=2)
    before = train(cfg, path)
    lines = (path / "config.toml").read_text().splitlines()
    rare = ("k", "beta", "semantic_entropy", "equivalence", "answer_prefix", "answer_max_tokens")
    rare += ("critic_lr_ratio", "budgets", "budget_weights", "answers")
    old = [x for x in lines if x.partition(" = ")[0] not in rare]
    assert len(lines) - len(old) == len(rare)
    (path / "config.toml").write_text("\n".join(old))
    assert main(["verify", "run", str(path), "--replays", "1", "--draw", "0"]) == 0
    assert load_run(path).summary["fingerprint"] == before.fingerprint
    assert resume(path, {"steps": "3"}).fingerprint == train(config(steps=3), tmp_path / "whole").fingerprint


def test_a_rare_setting_of_a_run_that_exists_cannot_change(config, tmp_path):
    train(config(loss__preset="pass_at_k", num_generations=4, loss__k=3, steps=1), tmp_path / "run")
    with pytest.raises(ValueError, match=r"run: loss\.k \(2, was 3\) decides bits"):
        resume(tmp_path / "run", {"loss.k": "2", "steps": "2"})
