"""A run of BRPO learns at every budget, as docs/train-yours.md tells."""

import json
from pathlib import Path

import pytest
from zerokl.engine.config.config_file import load_config

from tests.engine.runs.exact_runs import train_exactly
from tests.random_model import TWO_LAYERS, random_model

pytestmark = pytest.mark.proof
REWARD = '''
def letters(problem, completion):
    """The share of letters among the characters; 0 without any."""
    return sum(map(str.isalpha, completion)) / max(1, len(completion))
'''
BUDGETS = [1, 4, 8]


def test_the_reward_rises_at_every_budget(tmp_path: Path):
    (tmp_path / "letters.py").write_text(REWARD)
    settings = {
        "model": str(random_model(tmp_path / "model", TWO_LAYERS)),
        "loss.preset": "brpo",
        "loss.budgets": BUDGETS,
        "loss.answers": 2,
        "task.answer_prefix": "=",
        "task.reward": "letters:letters",
        "task.directory": str(tmp_path),
        "task.reward_processes": 1,
        "sampling.max_tokens": 8,
        "sampling.answer_max_tokens": 4,
        "prompts": 6,
        "num_generations": 4,
        "steps": 12,
        "workers": 1,
        "optimizer.lr": 3e-3,
        "evaluation.every": 12,
        "evaluation.problems": 32,
        "evaluation.temperature": 1.0,
    }
    run = train_exactly(load_config(None, None, settings), tmp_path / "run")
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in (f"brpo/reward_at_{budget}" for budget in BUDGETS):
        print(f"{name}: {metrics[0][name]:.3f} in the first step, {metrics[-1][name]:.3f} in the last")
        assert metrics[-1][name] > metrics[0][name] + 0.2
    print({name: value for name, value in metrics[-1].items() if name.startswith("eval/")}, run.tokens)
