"""Runs whose advantages need more of a group than its rewards."""

import numpy as np
import pytest
from zerokl.engine.loss.advantage import advantages
from zerokl.engine.runs.run import train


def test_pass_at_k_trains_on_a_binary_reward_with_the_advantages_of_its_log(config, read_jsonl, tmp_path):
    run = train(config(loss__preset="pass_at_k", num_generations=5, loss__k=3), tmp_path / "run")
    assert (run.tokens_unequal, run.mismatch_max_abs) == (0, 0.0)
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
