"""What is evaluated where the sampler's policy is not the trainer's."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from zerokl.engine.config.run_config import Config
from zerokl.engine.runs.loaded import load_run
from zerokl.engine.runs.run import train
from zerokl.engine.tasks.base import Problem
from zerokl.engine.tasks.loading import load_task

OF_BOTH = ("eval/sampler_reward", "eval/training_reward", "eval/sampler_training_reward")
SETTINGS = dict(evaluation__every=2, evaluation__problems=12, optimizer__lr=2e-2, steps=2)
# A rounding that is coarse enough to change greedy completions of a model of random weights.
PERTURBED = {"exact": False, "perturb__round_weights": "float8_e5m2", "perturb__gain": 8.0}


@pytest.fixture(scope="module")
def perturbed(config):
    return config(**SETTINGS, **PERTURBED)


@pytest.fixture(scope="module")
def run(perturbed, tmp_path_factory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("both") / "run"
    return path, train(perturbed, path).fingerprint


def greedy_reward(folder: Path, cfg: Config, split: str = "held_out") -> float:
    """The mean reward of what transformers draws greedily with a model folder for the problems of a split."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    problems = load_task(cfg.task.name, cfg.task.options).problems(split)[: cfg.evaluation.problems]
    rewards = []
    for problem in problems:
        ids = torch.tensor([tokenizer.encode(problem.prompt, add_special_tokens=False)])
        ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
        drawn = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=cfg.sampling.max_tokens,
            **ends,
        )
        text = tokenizer.decode(drawn[0, ids.shape[1] :], skip_special_tokens=True)
        rewards.append(toy_reward(problem, text))
    return float(np.mean(rewards))


def toy_reward(problem: Problem, text: str) -> float:
    """The reward of these runs, written once more: letters divided by 8."""
    return sum(c.isalpha() for c in text) / 8


def test_both_policies_are_evaluated_and_each_is_its_own(run, perturbed, tmp_path, read_jsonl):
    """transformers' greedy completions earn the same: of the checkpoint, and of the rounded checkpoint."""
    path, _ = run
    first, metrics = read_jsonl(path / "metrics.jsonl")
    assert set(OF_BOTH) <= metrics.keys()
    assert not set(OF_BOTH) & first.keys()
    checkpoint = path / "checkpoints" / "step-000002"
    assert metrics["eval/reward"] == pytest.approx(greedy_reward(checkpoint, perturbed), abs=1e-6)
    rounded = shutil.copytree(checkpoint, tmp_path / "rounded")
    weights = load_file(checkpoint / "model.safetensors")
    moved = {n: w + (w.to(torch.float8_e5m2).float() - w) * 8.0 for n, w in weights.items()}
    save_file(moved, rounded / "model.safetensors", metadata={"format": "pt"})
    assert metrics["eval/sampler_reward"] == pytest.approx(greedy_reward(rounded, perturbed), abs=1e-6)
    assert metrics["eval/sampler_reward"] != metrics["eval/reward"], "the test can tell them apart"


def test_it_changes_no_bit_and_can_be_off(run, perturbed, tmp_path):
    _, fingerprint = run
    off = perturbed.evaluation.model_copy(update={"both_policies": False})
    assert (
        train(perturbed.model_copy(update={"evaluation": off}), tmp_path / "off").fingerprint == fingerprint
    )
    assert not set(OF_BOTH) & load_run(tmp_path / "off").metrics.keys()


def test_one_policy_is_evaluated_once(config, tmp_path):
    train(config(**SETTINGS), tmp_path / "run")
    assert not set(OF_BOTH) & load_run(tmp_path / "run").metrics.keys()


def test_training_problems_are_evaluated_where_asked(config, tmp_path, read_jsonl):
    """With top-k of 1 the draw at temperature 1 is greedy, and transformers' completions earn the same."""
    cfg = config(**SETTINGS, evaluation__training=True, sampling__top_k=1)
    train(cfg, tmp_path / "run")
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    expected = greedy_reward(tmp_path / "run" / "checkpoints" / "step-000002", cfg, "train")
    assert last["eval/training_reward"] == pytest.approx(expected, abs=1e-6)
    assert not {"eval/sampler_reward", "eval/sampler_training_reward"} & last.keys()


@pytest.mark.full
@pytest.mark.parametrize(("gain", "warned"), [(60.0, 1), (0.0, 0)])
def test_a_difference_beyond_chance_is_said_once_before_the_end(config, tmp_path, capsys, gain, warned):
    """The sampler's weights are junk, or the trainer's: with a gain of 0 nothing is moved."""
    changes = PERTURBED | SETTINGS | {"perturb__gain": gain, "steps": 3, "evaluation__every": 1}
    train(config(**changes, evaluation__num_generations=4, evaluation__temperature=1.0), tmp_path / "run")
    lines = [line for line in capsys.readouterr().out.splitlines() if "your curve is the sampler's" in line]
    assert len(lines) in ((1, 2) if warned else (0,))
    if warned:
        assert "the sampler earns" in lines[-1]
        assert "standard error" in lines[-1]
