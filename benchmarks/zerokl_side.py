"""zerokl's side of a benchmark whose sides take turns (by_turns.py): a step a turn, each of one size."""

import time
from pathlib import Path

import by_turns
import torch
from letters import Letters
from zerokl.engine.config.config_file import load_config
from zerokl.engine.runs.setup import make_state
from zerokl.engine.tasks.rewards import Reward
from zerokl.engine.train.step import train_step

PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 64


def take_steps(model: Path, dtype: str, turns: int, threads: int, **settings: str) -> None:
    """Steps of PROMPTS x SAMPLES completions of NEW_TOKENS tokens. settings: those that differ."""
    torch.set_num_threads(threads)
    values = {
        "model": str(model),
        "dtype": dtype,
        "prompts": str(PROMPTS),
        "num_generations": str(SAMPLES),
        "steps": str(turns),
        "sampling.max_tokens": str(NEW_TOKENS),
    }
    config, task = load_config(None, None, values | settings), Letters(PROMPTS)
    state = make_state(config, model, task, Reward(task.reward))
    state.tokenizer.stop_ids = frozenset()  # so that no completion is shorter
    for _ in range(turns):
        by_turns.wait()
        began = time.perf_counter()
        metrics = train_step(state).metrics
        step_s, sample_s = time.perf_counter() - began, metrics["time/sample_s"]
        by_turns.answer(step_s=step_s, sample_s=sample_s, train_s=step_s - sample_s)
        assert metrics["mismatch/frac_equal"] == 1.0
        assert metrics["tokens"] == PROMPTS * SAMPLES * NEW_TOKENS
    state.close()
