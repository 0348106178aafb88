"""The demo's model learns tasks of many turns: a tool, and a game that it plays against itself."""

import pytest
from zerokl.engine.config.config_file import load_config
from zerokl.engine.runs.run import train

NIM = {
    "task.name": "nim",
    "task.options": {"max_stones": 12},
    "sampling.max_tokens": "3",
    "environment.max_turns": "12",
    "optimizer.schedule": "constant",
    "optimizer.lr": "3e-4",
    "loss.kl_coef": "0.05",
    "steps": "300",
    "evaluation.every": "100",
}

GUESSES = {
    "task.name": "guesses",
    "task.options": {"train": 2000},
    "environment.max_turns": "3",
    "sampling.max_tokens": "8",
    "prompts": "16",
    "optimizer.lr": "3e-4",
    "steps": "60",
    "evaluation.problems": "256",
    "evaluation.every": "20",
}

# The base model finds 0.375 of the words within its guesses.
WORDLE = {
    "task.name": "wordle",
    "environment.max_turns": "4",
    "sampling.max_tokens": "5",
    "prompts": "24",
    "optimizer.schedule": "constant",
    "optimizer.lr": "3e-4",
    "steps": "80",
    "evaluation.problems": "24",
    "evaluation.num_generations": "8",
    "evaluation.temperature": "1.0",
    "evaluation.every": "20",
}

DTYPES = ("float32", "bfloat16", "float16")
# The settings of a task, the least accuracy that it must reach, and the dtypes.
TASKS = {
    "calculator": ({}, 0.9, DTYPES),
    "nim": (NIM, 0.8, DTYPES),
    "guesses": (GUESSES, 0.7, ["float32"]),
    "wordle": (WORDLE, 0.55, ["float32"]),
}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("task", "dtype"), [(task, dtype) for task, (_, _, dtypes) in TASKS.items() for dtype in dtypes]
)
def test_the_model_learns_and_every_drawn_token_is_exact(tmp_path, task, dtype):
    settings, least, _ = TASKS[task]
    summary = train(load_config(None, "turns", settings | {"dtype": dtype}), tmp_path / "run")
    assert (summary.mismatch_max_abs, summary.tokens_unequal) == (0.0, 0)
    assert summary.held_out_accuracy >= least
