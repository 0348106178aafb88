"""`zerokl init`: a small base model for a task, warm-started until it solves some of the training prompts.

This is a small form of the sanity test of "Defeating the training-inference mismatch via FP16"
(arXiv:2510.26788). The model takes supervised steps on correct answers until a sampled completion is right
for a share of TARGET of the training problems. Then the problems are listed that the model solves sometimes
but not always: the perfectible set. On such a set a sound trainer must reach a training reward near 1.
"""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...files.writing import check_writable
from ...kernels.philox import Stream, uniform_range
from ...kernels.sampling_params import SamplingParams
from ...model.checkpoint import write_checkpoint
from ...model.config import ModelConfig
from ...model.decoder import Buffers, Decoder
from ...model.scoring import logprobs, pack
from ...model.weights import Layout
from ..config import OptimizerConfig, TaskConfig
from ..display.progress import Display
from ..display.terminal import console
from ..parallel.partition import virtual_shards
from ..parallel.workers import ParallelSampler, Workers, automatic
from ..rollout.evaluate import evaluate
from ..rollout.types import GenerationParams, RngKey, Sampler
from ..tasks.base import Problem, Task
from ..tasks.loading import load_task, problems_of
from ..tasks.perfectible import PERFECTIBLE_FILE
from ..tasks.rewards import Reward, open_reward
from ..tasks.tokenizer import Tokenizer, character_tokenizer
from ..train.collect import step_problems
from ..train.optimizer import Optimizer

# The warm start ends when a sampled completion solves this share of the training problems.
TARGET = 0.5
# A share above this is reported, because little is left to learn.
TOO_GOOD = 0.6
# The perfectible set: its largest size, the samples drawn of each problem, and the bounds of the share of
# samples that solve a problem (the paper's bounds).
SET_SIZE, SET_SAMPLES, SOLVED = 128, 16, (0.2, 0.8)
_MAX_STEPS, _BATCH, _SHARDS = 3000, 64, 4
# The accuracy is measured on this many training problems at most.
_PROBE = 256
# Steps between measurements of the accuracy. They are more frequent once learning is under way, so that the
# model is not trained too far.
_CHECK_EVERY, _CHECK_OFTEN = 10, 2
_OPTIMIZER = OptimizerConfig(lr=2e-3, warmup_steps=20, schedule="linear", min_lr_ratio=0.1, weight_decay=0.0)

PRESETS: dict[str, dict[str, int]] = {
    # 1.1 million parameters
    "tiny": dict(
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=32,
    ),
    # 2.7 million parameters
    "small": dict(
        hidden_size=224,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=7,
        num_key_value_heads=1,
        head_dim=32,
    ),
}


def initialise(
    out: Path, task_name: str, options: Mapping[str, Any], preset: str = "tiny", seed: int = 0
) -> dict[str, Any]:
    """Write a base model for a task to the folder `out`. Returns the content of perfectible.json.

    Raises ValueError for an unknown task or preset, for a task whose answers are not completions, and if
    `out` exists.
    """
    if preset not in PRESETS:
        raise ValueError(f"init: preset {preset} is not known; choose {', '.join(PRESETS)}")
    if out.exists():
        raise ValueError(f"init: {out} already exists; nothing was overwritten")
    check_writable(out.parent)
    task = load_task(task_name, options)
    settings = TaskConfig(name=task_name, options=dict(options)).reward_settings
    with open_reward(task, settings, console.print) as reward:
        problems = _problems_with_answers(task_name, task, reward)
        report = {"task": task_name, "options": dict(options), "preset": preset, "seed": seed}
        return _initialise(out, report, problems, reward)


def _initialise(
    out: Path, report: dict[str, Any], problems: Sequence[Problem], reward: Reward
) -> dict[str, Any]:
    """See initialise. report: what is asked for. Returns it with what became of it."""
    seed, characters = report["seed"], character_tokenizer()
    decoder = random_decoder(report["preset"], len(characters), seed)
    scratch = out.with_name(f".{out.name}.tokenizer")
    characters.save_pretrained(scratch)
    try:
        tokenizer = Tokenizer(scratch, decoder.config.vocab_size)
        with Workers(decoder, _SHARDS, automatic(decoder.layout.numel)) as workers:
            accuracy, steps = _warm_start(decoder, workers, tokenizer, problems, reward, seed)
            if accuracy > TOO_GOOD:
                console.say(
                    f"the warm start ended at {accuracy:.2f} of the training prompts, above the {TOO_GOOD} "
                    "it aims below: on a set this small accuracy rises in leaps; give the task more "
                    "training problems for a base model that errs more"
                )
            prompts = _perfectible(ParallelSampler(workers), tokenizer, problems, reward, seed)
        report |= {"accuracy": accuracy, "steps": steps, "samples": SET_SAMPLES, "prompts": prompts}
        extra = {PERFECTIBLE_FILE: json.dumps(report) + "\n"}
        write_checkpoint(out, decoder.layout, decoder.flat.detach(), companions=scratch, extra=extra)
    finally:
        shutil.rmtree(scratch)
    return report


def _problems_with_answers(name: str, task: Task, reward: Reward) -> list[Problem]:
    """The training problems of a task. Raises ValueError where an answer is not a correct completion."""
    problems = problems_of(task, name, "train")
    if not problems:
        raise ValueError(f"task {name}: has no training problems")
    if task.chat or (reward.values(problems, [[p.answer] for p in problems]) != 1.0).any():
        raise ValueError(
            f"init: task {name} has answers that are no completions; "
            "init needs add, sort, countdown or a task like them"
        )
    return problems


def random_decoder(preset: str, vocab_size: int, seed: int) -> Decoder:
    """A Qwen3 with random matrices, from counter-based numbers, and norms of 1.

    The elements of a matrix are uniform in +-sqrt(3 / fan_in), and half of this in the output matrices of
    attention and MLP. fan_in is the number of columns, and the hidden size for the embedding.
    """
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        **PRESETS[preset],
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
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
    decoder: Decoder,
    workers: Workers,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    reward: Reward,
    seed: int,
) -> tuple[float, int]:
    """Supervised steps on correct answers until TARGET is reached. Returns accuracy and number of steps."""
    eos = min(tokenizer.stop_ids)
    prompts = tokenizer.encode_problems(problems, chat=False)
    completions = [[*tokenizer.encode(p.answer, chat=False), eos] for p in problems]
    longest = max(map(len, completions))
    generation_params = GenerationParams(SamplingParams(), 1, longest, tokenizer.stop_ids)
    optimizer = Optimizer(decoder, decoder.flat.detach(), _OPTIMIZER, _MAX_STEPS)
    sampler, accuracy, tokens, began_s = ParallelSampler(workers), 0.0, 0, time.perf_counter()
    probe = problems[:_PROBE]
    # Accuracy rises slowly, then fast, so the time that is left does not follow from the time so far.
    with Display(100, "warm start", curve=("training prompts solved", ()), shows_time_left=False) as display:
        for step in range(1, _MAX_STEPS + 1):
            chosen = step_problems(len(problems), min(_BATCH, len(problems)), seed, step, Stream.WARM_START)
            batch = [(prompts[i], completions[i]) for i in chosen]
            work = partial(_shard_gradient, tokens=sum(len(completion) for _, completion in batch))
            shards = [shard or None for shard in virtual_shards(batch, _SHARDS)]
            _, gradient = workers.sum_shards(work, shards)
            optimizer.update(gradient)
            tokens += sum(len(prompt) + len(completion) for prompt, completion in batch)
            if step % (_CHECK_EVERY if accuracy < TARGET / 3 else _CHECK_OFTEN):
                continue
            rng_key = RngKey(seed, step, Stream.WARM_START_PROBE)
            ids = [prompts[p.id] for p in probe]
            accuracy = evaluate(
                sampler, tokenizer, probe, ids, reward, generation_params, rng_key
            ).mean_reward
            display.step(
                [
                    f"until {TARGET}",
                    f"step {step}",
                    f"{tokens / (time.perf_counter() - began_s):,.0f} tokens/s",
                ],
                value=accuracy,
                completed=min(100, int(100 * accuracy / TARGET)),
            )
            if accuracy >= TARGET:
                return accuracy, step
    raise ValueError(
        f"init: after {_MAX_STEPS} supervised steps the model solves {accuracy:.2f} of the training prompts, "
        f"not {TARGET}; make the task easier"
    )


def _shard_gradient(
    decoder: Decoder,
    shards: Sequence[Sequence[tuple[list[int], list[int]]]],
    buffers: Buffers,
    tokens: int,
) -> list[None]:
    """The gradient of the mean cross-entropy over `tokens` completion tokens, of one shard."""
    (shard,) = shards
    logp, _ = logprobs(decoder, pack(shard), SamplingParams(), buffers=buffers)
    (-logp.sum() / tokens).backward()
    return [None]


def _perfectible(
    sampler: Sampler, tokenizer: Tokenizer, problems: Sequence[Problem], reward: Reward, seed: int
) -> list[str]:
    """The prompts, in order, of up to SET_SIZE problems that the model solves sometimes but not always.

    Of SET_SAMPLES samples of such a problem, the share that solves it is within the bounds SOLVED.
    """
    longest = max(len(tokenizer.encode(p.answer, chat=False)) for p in problems) + 1
    generation_params = GenerationParams(SamplingParams(), SET_SAMPLES, longest, tokenizer.stop_ids)
    prompts: list[str] = []
    wanted = min(SET_SIZE, len(problems))
    with Display(wanted, "perfectible set", shows_time_left=False) as display:
        for start in range(0, len(problems), SET_SIZE):
            batch = problems[start : start + SET_SIZE]
            ids = tokenizer.encode_problems(batch, chat=False)
            rng_key = RngKey(seed, start // SET_SIZE, Stream.PERFECTIBLE)
            evaluation = evaluate(sampler, tokenizer, batch, ids, reward, generation_params, rng_key)
            rates = evaluation.rewards.mean(axis=1)
            solved_sometimes = np.flatnonzero((rates >= SOLVED[0]) & (rates <= SOLVED[1]))
            prompts += [batch[i].prompt for i in solved_sometimes]
            tried = min(start + SET_SIZE, len(problems))
            display.step(
                [f"{len(prompts)} prompts are solved sometimes", f"{tried} of {len(problems)} tried"],
                completed=wanted if tried == len(problems) else min(wanted, len(prompts)),
            )
            if len(prompts) >= SET_SIZE:
                break
    return prompts[:SET_SIZE]
