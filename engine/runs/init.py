"""`zerokl init`: a small base model for a task, warm-started until it solves some of the training prompts.

The sanity test of "Defeating the training-inference mismatch via FP16" (arXiv:2510.26788) in small:
supervised steps on correct answers until a sampled completion is right on TARGET of the training problems,
and a list of problems that are solved sometimes but not always. On such a set a sound trainer must reach a
training reward near 1.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...kernels.sampling_params import SamplingParams
from ...kernels.philox import Stream, uniform_range
from ...model.checkpoint import write_checkpoint
from ...model.config import ModelConfig
from ...model.decoder import Decoder
from ...model.scoring import logprobs, pack
from ...model.weights import Layout
from ..train.collect import step_problems
from ..config import OptimizerConfig
from ..rollout.evaluate import evaluate
from ..train.optimizer import Optimizer
from .terminal import Display, console
from ..rollout.types import GenerationParams, RngKey, Sampler
from ..parallel.partition import virtual_shards
from ..tasks import Reward, load_task, problems_of
from ..tasks.base import Problem
from ..tasks.perfectible import PERFECTIBLE_FILE
from ..tasks.tokenizer import Tokenizer, character_tokenizer
from ..parallel.workers import ParallelSampler, Workers, automatic

# Share of training problems a sampled completion solves at which the warm start ends.
TARGET = 0.5
# A share above this is said: little is left to learn.
TOO_GOOD = 0.6
# The perfectible set: its size at most, and the share of SET_SAMPLES samples that solve each of its problems
# (the paper's bounds).
SET_SIZE, SET_SAMPLES, SOLVED = 128, 16, (0.2, 0.8)
_MAX_STEPS, _BATCH, _SHARDS = 3000, 64, 4
# Steps between checks; more often once learning is under way, so that the end is not overshot.
_CHECK_EVERY, _CHECK_OFTEN = 10, 2
_OPTIMIZER = OptimizerConfig(lr=2e-3, warmup_steps=20, schedule="linear", min_lr_ratio=0.1, weight_decay=0.0)

PRESETS: dict[str, dict[str, int]] = {
    # 1.1 million parameters
    "tiny": dict(hidden_size=160, intermediate_size=448, num_hidden_layers=4, num_attention_heads=5, num_key_value_heads=1, head_dim=32),
    # 2.7 million parameters
    "small": dict(hidden_size=224, intermediate_size=640, num_hidden_layers=5, num_attention_heads=7, num_key_value_heads=1, head_dim=32),
}


def initialise(out: Path, task_name: str, options: Mapping[str, Any], preset: str = "tiny", seed: int = 0) -> dict[str, Any]:
    """Write a base model for a task to the folder `out`. Returns what perfectible.json holds.

    Raises ValueError for an unknown task or preset, a task without known completions, or an `out` that
    exists.
    """
    if preset not in PRESETS:
        raise ValueError(f"init: preset {preset} is not known; choose {', '.join(PRESETS)}")
    if out.exists():
        raise ValueError(f"init: {out} already exists; nothing was overwritten")
    task = load_task(task_name, options)
    problems = problems_of(task, task_name, "train")
    if not problems:
        raise ValueError(f"task {task_name}: has no training problems")
    wrong = next((p for p in problems if task.reward(p, p.answer) != 1.0), None)
    if wrong is not None or task.chat:
        raise ValueError(f"init: task {task_name} has answers that are no completions; init needs add, sort, countdown or a task like them")
    tokenizer = character_tokenizer()
    decoder = random_decoder(preset, len(tokenizer), seed)
    scratch = out.with_name(f".{out.name}.tokenizer")
    tokenizer.save_pretrained(scratch)
    try:
        tokenizer = Tokenizer(scratch, decoder.config.vocab_size)
        with Workers(decoder, _SHARDS, automatic(decoder.layout.numel)) as workers:
            accuracy, steps = _warm_start(decoder, workers, tokenizer, problems, task.reward, seed)
            if accuracy > TOO_GOOD:
                console.print(
                    f"the warm start ended at {accuracy:.2f} of the training prompts, above the {TOO_GOOD} it aims below: on a "
                    "set this small accuracy rises in leaps; give the task more training problems for a base model that errs more"
                )
            found = _perfectible(ParallelSampler(workers), tokenizer, problems, task.reward, seed)
        report = {
            "task": task_name, "options": dict(options), "preset": preset, "seed": seed, "accuracy": accuracy, "steps": steps,
            "samples": SET_SAMPLES, "prompts": found,
        }
        extra = {PERFECTIBLE_FILE: json.dumps(report) + "\n"}
        write_checkpoint(out, decoder.layout, decoder.flat.detach(), companions=scratch, extra=extra)
    finally:
        for file in scratch.iterdir():
            file.unlink()
        scratch.rmdir()
    return report


def random_decoder(preset: str, vocab_size: int, seed: int) -> Decoder:
    """A Qwen3 with matrices uniform in +-sqrt(3) * 0.02 * sqrt(512 / width), norms 1, from counter-based
    numbers.
    """
    raw = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocab_size, **PRESETS[preset],
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": True, "hidden_act": "silu",
        "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False, "pad_token_id": 0, "eos_token_id": 1,
        "bos_token_id": None,
    }
    config = ModelConfig.from_dict(raw)
    layout = Layout(config)
    flat = torch.zeros(layout.numel)
    for i, (name, view) in enumerate(layout.views(flat).items()):
        if view.dim() == 1:
            view.fill_(1.0)
            continue
        fan_in = config.hidden_size if name == "embed" else view.shape[1]
        scale = (3.0 / fan_in) ** 0.5 * (0.5 if name.endswith((".o", ".down")) else 1.0)
        u = uniform_range(view.numel(), seed, Stream.WEIGHTS, word=i)
        view.copy_(torch.from_numpy((2.0 * u - 1.0) * scale).view(view.shape))
    return Decoder(config, flat, layout)


def _warm_start(
    decoder: Decoder, workers: Workers, tokenizer: Tokenizer, problems: Sequence[Problem], reward: Reward, seed: int
) -> tuple[float, int]:
    """Supervised steps on correct answers until TARGET is reached. Returns accuracy and steps."""
    eos = min(tokenizer.stop_ids)
    pairs = [(tokenizer.encode(p.prompt, chat=False), [*tokenizer.encode(p.answer, chat=False), eos]) for p in problems]
    optimizer, sampler = Optimizer(decoder, decoder.flat.detach(), _OPTIMIZER, _MAX_STEPS), ParallelSampler(workers)
    probe = problems[: min(len(problems), 256)]
    longest = max(len(c) for _, c in pairs)
    display, accuracy = Display(100, "init"), 0.0
    try:
        for step in range(1, _MAX_STEPS + 1):
            chosen = step_problems(len(pairs), min(_BATCH, len(pairs)), seed, step, Stream.WARM_START)
            batch = [pairs[i] for i in chosen]
            work = partial(_shard_gradient, tokens=sum(len(c) for _, c in batch))
            optimizer.update(workers.sum_shards(work, [shard or None for shard in virtual_shards(batch, _SHARDS)])[1])
            if step % (_CHECK_EVERY if accuracy < TARGET / 3 else _CHECK_OFTEN):
                continue
            rng_key = RngKey(seed, step, Stream.WARM_START_PROBE)
            ids = [pairs[p.id][0] for p in probe]
            accuracy = evaluate(sampler, tokenizer, probe, ids, reward, GenerationParams(SamplingParams(), 1, longest, tokenizer.stop_ids), rng_key).mean_reward
            display.step(
                f"step {step}  solves {accuracy:.2f} of the training prompts, until {TARGET}",
                done=min(100, int(100 * accuracy / TARGET)),
            )
            if accuracy >= TARGET:
                return accuracy, step
    finally:
        display.close()
    raise ValueError(
        f"init: after {_MAX_STEPS} supervised steps the model solves {accuracy:.2f} of the training prompts, "
        f"not {TARGET}; make the task easier"
    )


def _shard_gradient(decoder: Decoder, shard: Sequence[tuple[list[int], list[int]]], tokens: int) -> None:
    """The gradient of the mean cross-entropy over `tokens` completion tokens."""
    logp, _ = logprobs(decoder, pack(shard), SamplingParams())
    (-logp.sum() / tokens).backward()


def _perfectible(sampler: Sampler, tokenizer: Tokenizer, problems: Sequence[Problem], reward, seed: int) -> list[str]:
    """Prompts of up to SET_SIZE problems that a share within SOLVED of SET_SAMPLES samples solves, in order."""
    longest = max(len(tokenizer.encode(p.answer, chat=False)) for p in problems) + 1
    generation_params = GenerationParams(SamplingParams(), SET_SAMPLES, longest, tokenizer.stop_ids)
    found: list[str] = []
    for start in range(0, len(problems), SET_SIZE):
        some = problems[start : start + SET_SIZE]
        ids = tokenizer.encode_problems(some, chat=False)
        rng_key = RngKey(seed, start // SET_SIZE, Stream.PERFECTIBLE)
        rates = evaluate(sampler, tokenizer, some, ids, reward, generation_params, rng_key).rewards.mean(axis=1)
        found += [some[i].prompt for i in np.flatnonzero((rates >= SOLVED[0]) & (rates <= SOLVED[1]))]
        if len(found) >= SET_SIZE:
            break
    return found[:SET_SIZE]
