"""`zerokl init`: a small base model for a task, warm-started until it solves some of the training prompts.

This is a small form of the sanity test of "Defeating the training-inference mismatch via FP16"
(arXiv:2510.26788). The model takes supervised steps on correct answers until one sampled completion of each
training problem has a mean reward of init.target. Then the problems are listed that the model solves
sometimes but not always: the perfectible set. On such a set a sound trainer must reach a training reward near
1.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ...files.writing import check_writable
from ...kernels.philox import Stream, uniform_range
from ...kernels.sampling_params import SamplingParams
from ...model.checkpoint_writing import write_checkpoint
from ...model.config import ModelConfig
from ...model.context import Buffers
from ...model.decoder import Decoder
from ...model.families import MODEL_TYPES
from ...model.scoring import logprobs, pack
from ...model.weights import Layout
from ..config.init_section import InitSettings
from ..config.run_config import EnvironmentConfig, OptimizerConfig, TaskConfig
from ..display.progress import Display
from ..display.terminal import console
from ..rollout.episodes import EpisodePlayer, Episodes, is_trained
from ..rollout.players import make_player, open_judge, turn_limits
from ..rollout.types import Completion, GenerationParams, Request, RngKey, Rollout, Sampler
from ..tasks.base import Problem, Task
from ..tasks.environment import EnvironmentTask
from ..tasks.loading import load_task, problems_of
from ..tasks.pairs import Pairs
from ..tasks.perfectible import PERFECTIBLE_FILE
from ..tasks.tokenizer import Tokenizer, character_tokenizer
from ..train.collect import step_problems
from ..train.master_weights import SlicedWeights
from ..train.optimizer import Optimizer
from ..train.parallel.partition import virtual_shards
from ..train.parallel.workers import ParallelSampler, Workers, automatic

# An accuracy that is this much above the target is reported: less is left to learn than was asked for.
_TOO_FAR = 0.1
# Problems that are tried at a time for the perfectible set.
_TRIED = 128
_MAX_STEPS, _BATCH, _SHARDS = 3000, 64, 4
# The accuracy is measured on this many training problems at most.
_PROBE = 256
# Steps between measurements of the accuracy. They are more frequent once learning is under way, so that the
# model is not trained too far.
_CHECK_EVERY, _CHECK_OFTEN = 10, 2
_OPTIMIZER = OptimizerConfig(lr=2e-3, warmup_steps=20, schedule="linear", min_lr_ratio=0.1, weight_decay=0.0)

_CONTEXT = 512
_DEFAULT = InitSettings()
_NO_ANSWERS = (
    "init: the task has answers that are no completions; init needs add, sort, sums, countdown or a "
    "task like them"
)

_TINY = dict(
    hidden_size=160,
    intermediate_size=448,
    num_hidden_layers=4,
    num_attention_heads=5,
    num_key_value_heads=1,
    head_dim=32,
)
PRESETS: dict[str, dict[str, Any]] = {
    # 0.1 million parameters
    "mini": dict(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    ),
    # 1.1 million parameters
    "tiny": _TINY,
    # 2.7 million parameters
    "small": dict(
        hidden_size=224,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=7,
        num_key_value_heads=1,
        head_dim=32,
    ),
    # A mixture of experts: 3.7 million parameters. A token uses as many as the tiny model has.
    "moe": _TINY | dict(MODEL_TYPES["qwen3_moe"].small),
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# The tiny model of each family, by its model_type.
PRESETS |= {name: _TINY | {"model_type": name} | dict(family.small) for name, family in MODEL_TYPES.items()}


def initialise(
    out: Path,
    task_name: str,
    options: Mapping[str, Any],
    preset: str = "tiny",
    seed: int = 0,
    init: InitSettings = _DEFAULT,
) -> dict[str, Any]:
    """Write a base model for a task to the folder `out`. Returns the content of perfectible.json.

    Raises ValueError for an unknown task or preset, for sizes that do not go together, for a task whose
    answers are not completions, and if `out` exists.
    """
    if preset not in PRESETS:
        raise ValueError(f"init: preset {preset} is not known; choose {', '.join(PRESETS)}")
    if out.exists():
        raise ValueError(f"init: {out} already exists; nothing was overwritten")
    check_writable(out.parent)
    task = load_task(task_name, options)
    config, environment = TaskConfig(name=task_name, options=dict(options)), EnvironmentConfig()
    problems = problems_of(task, task_name, "train")
    if isinstance(task, Pairs):
        raise ValueError("init: the task pairs has no reward; name a model that writes such completions")
    if not problems or task.chat:
        raise ValueError(f"task {task_name}: has no training problems" if not problems else _NO_ANSWERS)
    report = {"task": task_name, "options": dict(options), "preset": preset, "seed": seed}
    report["init"] = init.model_dump(mode="json")
    with open_judge(task, config, environment, console.print) as judge:

        def player_of(tokenizer: Tokenizer) -> EpisodePlayer:
            limits = turn_limits(environment, _CONTEXT, _CONTEXT)
            return make_player(task, judge, tokenizer, limits, environment.render, console.print)

        return _initialise(out, report, init, problems, task, player_of)


def _initialise(
    out: Path,
    report: dict[str, Any],
    init: InitSettings,
    problems: Sequence[Problem],
    task: Task | EnvironmentTask,
    player_of: Callable[[Tokenizer], EpisodePlayer],
) -> dict[str, Any]:
    """Write what `initialise` promises. report: what is asked for. Returns it with what became of it."""
    seed, characters = report["seed"], character_tokenizer()
    decoder = random_decoder(report["preset"], len(characters), seed, init.sizes)
    scratch = out.with_name(f".{out.name}.tokenizer")
    characters.save_pretrained(scratch)
    try:
        tokenizer = Tokenizer(scratch, decoder.config.vocab_size)
        player = player_of(tokenizer)
        examples = _examples(task, player, tokenizer, problems)
        params = GenerationParams(SamplingParams(), 1, _longest_turn(examples), tokenizer.stop_ids)
        with Workers(decoder, _SHARDS, automatic(decoder.layout.numel)) as workers:
            warm_start = _WarmStart(decoder, workers, player, params, seed, init.target)
            accuracy, steps = _take_steps(warm_start, problems, examples)
            if accuracy > init.target + _TOO_FAR:
                console.say(
                    f"the warm start ended at {accuracy:.2f} of the training prompts, more than {_TOO_FAR} "
                    f"above its target {init.target:g}: on a set this small accuracy rises in leaps; give "
                    "the task more training problems for a base model that errs more"
                )
            prompts = _perfectible(ParallelSampler(workers), player, problems, params, seed, init)
        report |= {"accuracy": accuracy, "steps": steps, "samples": init.attempts, "prompts": prompts}
        extra = {PERFECTIBLE_FILE: json.dumps(report) + "\n"}
        write_checkpoint(out, decoder.layout, decoder.flat.detach(), companions=scratch, extra=extra)
    finally:
        shutil.rmtree(scratch)
    return report


class _Demonstrator(Sampler):
    """A sampler that writes given turns. turns: the texts of each problem's turns, in their order."""

    def __init__(self, turns: Sequence[Iterator[str]], tokenizer: Tokenizer, players: int):
        self._turns, self._tokenizer, self._players = turns, tokenizer, players

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions, eos = [], min(self._tokenizer.stop_ids)
        for request in requests:
            text = next(self._turns[request.rng_key.prompt // self._players], None)
            if text is None:
                raise ValueError(_NO_ANSWERS)
            ids = (*self._tokenizer.encode(text, chat=False), eos)
            completions.append(Completion(ids, np.zeros(len(ids), np.float32), "stop", 0))
        return completions

    def sync_weights(self, version: int) -> None:
        """It has no weights."""


def _examples(
    task: Task | EnvironmentTask, player: EpisodePlayer, tokenizer: Tokenizer, problems: Sequence[Problem]
) -> list[Rollout]:
    """For each problem a rollout that solves it; in a game, one for each player.

    Its turns are the task's demonstration, or the answer. Raises ValueError where they solve nothing.
    """
    demonstration = getattr(task, "demonstration", lambda problem: [problem.answer])
    turns = [iter(demonstration(problem)) for problem in problems]
    params = GenerationParams(SamplingParams(), 1, _CONTEXT, tokenizer.stop_ids)
    demonstrator = _Demonstrator(turns, tokenizer, player.players)
    episodes = player.play(demonstrator, problems, params, RngKey(0, 0, Stream.WARM_START))
    if not (_best(episodes, problems) == 1.0).all():
        raise ValueError(_NO_ANSWERS)
    return [r for r in episodes.rollouts if is_trained(r)]


def _best(episodes: Episodes, problems: Sequence[Problem]) -> np.ndarray:
    """The reward of each problem and sample, [P, G]; in a game that of the best player."""
    return episodes.rewards.reshape(len(problems), -1, episodes.rewards.shape[1]).max(axis=1)


def _longest_turn(examples: Sequence[Rollout]) -> int:
    """The drawn tokens of the longest turn."""
    return max(int(turn.sum()) for r in examples for turn in np.split(r.drawn, r.turn_starts[1:]))


def random_decoder(
    preset: str, vocab_size: int, seed: int, sizes: Mapping[str, int] | None = None
) -> Decoder:
    """A Qwen3, or a model of the preset's family. sizes: those that differ from the preset's.

    Its matrices are random, from counter-based numbers. Norms multiply by 1, and biases and sinks are 0.
    The elements of a matrix are uniform in +-sqrt(3 / fan_in), and half of this in the output matrices of
    attention and MLP. fan_in is the number of columns, and the hidden size for the embedding.
    """
    config = preset_config(preset, vocab_size, sizes)
    layout = Layout(config)
    flat = torch.zeros(layout.numel)
    for i, (name, view) in enumerate(layout.views(flat).items()):
        if view.dim() == 1 or name.endswith("bias"):
            plus_one = config.norm_plus_one and not name.endswith("gated_norm")
            view.fill_(0.0 if name.endswith(("bias", "sinks")) or plus_one else 1.0)
            continue
        # The matrices of all experts in one weight are transposed.
        is_transposed = ".experts." in name and view.dim() == 3
        fan_in = view.shape[1] if is_transposed else view[0].numel()
        fan_in = config.hidden_size if name == "embed" else fan_in
        scale = (3.0 / fan_in) ** 0.5 * (0.5 if name.endswith((".o", "down")) else 1.0)
        u = uniform_range(view.numel(), seed, Stream.WEIGHTS, word=i)
        view.copy_(torch.from_numpy((2.0 * u - 1.0) * scale).view(view.shape))
    return Decoder(config, flat, layout)


def preset_config(preset: str, vocab_size: int, sizes: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config of a preset. sizes: fields of config.json that differ from the preset's."""
    model_type = PRESETS[preset].get(
        "model_type", "qwen3_moe" if "num_experts" in PRESETS[preset] else "qwen3"
    )
    family = MODEL_TYPES[model_type]
    raw = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        **PRESETS[preset],
        **(sizes or {}),
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": family.small.get("rope_parameters", _PLAIN_ROPE),
        "tie_word_embeddings": True,
        "hidden_act": family.defaults.get("hidden_act", "silu"),
        "attention_bias": False,
        "attention_dropout": 0.0,
        **({"use_sliding_window": False} if "use_sliding_window" in family.defaults else {}),
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    return ModelConfig.from_dict(raw)


class _WarmStart(NamedTuple):
    """What the supervised steps are taken with. params: how a completion is drawn."""

    decoder: Decoder
    workers: Workers
    player: EpisodePlayer
    params: GenerationParams
    seed: int
    target: float


def _take_steps(
    warm_start: _WarmStart, problems: Sequence[Problem], examples: Sequence[Rollout]
) -> tuple[float, int]:
    """Supervised steps on the examples until the target is reached. Returns accuracy and number of steps."""
    decoder, workers, player, params, seed, target = warm_start
    optimizer = Optimizer(SlicedWeights(decoder, decoder.flat.detach()), _OPTIMIZER, _MAX_STEPS)
    sampler, accuracy, tokens, began_s = ParallelSampler(workers), 0.0, 0, time.perf_counter()
    probe = problems[:_PROBE]
    # Accuracy rises slowly, then fast, so the time that is left does not follow from the time so far.
    with Display(100, "warm start", curve=("training prompts solved", ()), shows_time_left=False) as display:
        for step in range(1, _MAX_STEPS + 1):
            chosen = step_problems(len(examples), min(_BATCH, len(examples)), seed, step, Stream.WARM_START)
            batch = [examples[i] for i in chosen]
            work = partial(_shard_gradient, tokens=sum(len(r.logprobs) for r in batch))
            shards = [shard or None for shard in virtual_shards(batch, _SHARDS)]
            _, gradient = workers.sum_shards(work, shards)
            optimizer.update(gradient)
            tokens += sum(len(r.ids) for r in batch)
            if step % (_CHECK_EVERY if accuracy < target / 3 else _CHECK_OFTEN):
                continue
            rng_key = RngKey(seed, step, Stream.WARM_START_PROBE)
            accuracy = float(_best(player.play(sampler, probe, params, rng_key), probe).mean())
            display.step(
                [
                    f"until {target:g}",
                    f"step {step}",
                    f"{tokens / (time.perf_counter() - began_s):,.0f} tokens/s",
                ],
                value=accuracy,
                completed=min(100, int(100 * accuracy / target)),
            )
            if accuracy >= target:
                return accuracy, step
    raise ValueError(
        f"init: after {_MAX_STEPS} supervised steps the model solves {accuracy:.2f} of the training prompts, "
        f"not {target:g}; make the task easier"
    )


def _shard_gradient(
    decoder: Decoder,
    shards: Sequence[Sequence[Rollout]],
    buffers: Buffers,
    tokens: int,
) -> list[None]:
    """The gradient of the mean cross-entropy over `tokens` tokens of the model's turns, of one shard."""
    (shard,) = shards
    packed = pack([r.pair for r in shard], masks=[r.mask for r in shard])
    logp, _ = logprobs(decoder, packed, SamplingParams(), buffers=buffers)
    (-logp.sum() / tokens).backward()
    return [None]


def _perfectible(
    sampler: Sampler,
    player: EpisodePlayer,
    problems: Sequence[Problem],
    generation_params: GenerationParams,
    seed: int,
    init: InitSettings,
) -> list[str]:
    """The prompts, in order, of up to init.problems problems that the model solves sometimes but not always.

    The mean reward of init.attempts samples of such a problem is within the bounds init.solved.
    """
    generation_params = replace(generation_params, num_generations=init.attempts)
    prompts: list[str] = []
    wanted = min(init.problems, len(problems))
    with Display(wanted, "perfectible set", shows_time_left=False) as display:
        for start in range(0, len(problems), _TRIED):
            batch = problems[start : start + _TRIED]
            rng_key = RngKey(seed, start // _TRIED, Stream.PERFECTIBLE)
            rates = _best(player.play(sampler, batch, generation_params, rng_key), batch).mean(axis=1)
            solved_sometimes = np.flatnonzero((rates >= init.solved[0]) & (rates <= init.solved[1]))
            prompts += [batch[i].prompt for i in solved_sometimes]
            tried = min(start + _TRIED, len(problems))
            display.step(
                [f"{len(prompts)} prompts are solved sometimes", f"{tried} of {len(problems)} tried"],
                completed=wanted if tried == len(problems) else min(wanted, len(prompts)),
            )
            if len(prompts) >= init.problems:
                break
    return prompts[: init.problems]
