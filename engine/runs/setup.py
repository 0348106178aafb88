"""Everything a step needs, made from a configuration and a model folder: `make_state`."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ...kernels.backend import find_device
from ...model.checkpoint import DTYPES, load_decoder, read_weights, resolve_model
from ...model.compute_weights import quantise_all
from ...model.config import ModelConfig
from ...model.decoder import Decoder
from ...model.offload import Offload
from ...model.weights import Layout
from ..config.compatibility import check_settings
from ..config.run_config import Config
from ..display.terminal import console
from ..rollout.budgets import DrawnAnswers
from ..rollout.given_answers import GivenAnswers
from ..rollout.players import Judge, make_player, open_judge, turn_limits
from ..rollout.stopwatch import Stopwatch
from ..rollout.types import check_room
from ..rollout.vllm.installed import installed_vllm, is_cpu_build
from ..tasks.base import Problem, Task
from ..tasks.environment import EnvironmentTask
from ..tasks.equivalence import Equivalence, open_equivalence
from ..tasks.loading import problems_of
from ..tasks.perfectible import perfectible_set
from ..tasks.tokenizer import Tokenizer
from ..train.ahead import Ahead
from ..train.loss_scaling import LossScaler
from ..train.optimizer import Optimizer
from ..train.parallel.cut import CutWorkers
from ..train.parallel.data_parallel import (
    RankedEnvironments,
    RankedEquivalence,
    RankedReward,
    RankedSampler,
    RankedScorer,
    ReplicatedWorkers,
)
from ..train.parallel.process_group import ALONE, Ranks
from ..train.parallel.scorer import Scorer, frozen
from ..train.parallel.spread import Cutting
from ..train.parallel.ulysses import ContextParts
from ..train.parallel.workers import Workers, automatic
from ..train.parallel.zero import Slices
from ..train.state import TrainState
from .compile_ahead import compiled_ahead
from .engine import Engine, EngineInputs, sharded_engine, tensor_engine
from .memory import PassSizes, RunShape, fit, layout_of_a_rank
from .offloading import placed, told
from .samplers import (
    Samplers,
    is_separate,
    make_samplers,
    numerics_of,
    refuse_model,
    sampling_context,
    shares_weights,
)
from .trained import adapter_layout, merge_first, model_layout, whole_weights


def make_state(
    config: Config,
    model: Path,
    task: Task | EnvironmentTask,
    judge: Judge,
    ranks: Ranks = ALONE,
    equivalence: Equivalence | RankedEquivalence | None = None,
) -> TrainState:
    """Load a model folder and set up everything that a step needs, in this process of `ranks`.

    judge: the task's reward or environments, over all ranks; whoever opened it closes it. equivalence: see
    run_equivalence.

    Raises ValueError.
    """
    assert (equivalence is not None) == bool(config.loss.semantic_entropy)
    model_config = ModelConfig.from_file(model)
    refuse_model(config, model_config)
    config.sampling.sampling_params.check(model_config.vocab_size)
    tokenizer = Tokenizer(model, model_config.vocab_size)
    problems = training_problems(task, config, model)
    stopwatch, max_tokens = Stopwatch(run_device(config)), config.sampling.max_tokens
    limits = turn_limits(config.environment, max_tokens, sampling_context(config, model_config))
    render = config.environment.render
    # What runs beside the trainer is no station of its step.
    player_stopwatch = None if config.pool.engine else stopwatch
    player = make_player(
        task, judge, tokenizer, limits, render, console.print, player_stopwatch, _answers(config)
    )
    _check_players(config.prompts, player.players)
    _check_binary(config, player.binary)
    checked = player.check(problems, max_tokens, model_config.max_positions)
    data_ranks = _data_ranks(config, ranks)
    check_room(config.prompts * config.rollouts_per_prompt // data_ranks, checked.max_tokens)
    device, layout = run_device(config), model_layout(config, model_config)
    ref_model = _ref_model(config, model, model_config)
    ref_numel = layout_of_a_rank(config, Layout(ref_model[1])).numel if ref_model else 0
    own_layout, base = adapter_layout(config, layout, model)
    shape = RunShape(
        config,
        layout_of_a_rank(config, layout),
        data_ranks,
        checked.prompt_tokens,
        ref_numel,
        checked.trajectory_tokens,
        own_layout,
        base,
    )
    shape = placed(shape, device)
    sizes = fit(shape, device)
    if shape.is_away and config.memory.offload == "auto":
        console.print(told(shape, sizes))
    inputs = EngineInputs(shape.config, model, layout, own_layout, base, ranks, device, ref_model)
    with compiled_ahead(shape, sizes, device, ranks):
        if config.parallel.engine == "fsdp":
            engine = sharded_engine(inputs, sizes.micro_batch, stopwatch)
        elif config.parallel.tensor > 1 or config.parallel.expert > 1:
            engine = tensor_engine(inputs, sizes.micro_batch, stopwatch)
        else:
            engine = _replicated_engine(inputs, sizes, stopwatch)
    return TrainState(
        config=config,
        policy=engine.policy,
        optimizer=engine.optimizer,
        scaler=LossScaler(config.precision, engine.policy.dtype),
        sampler=engine.samplers.training,
        evaluator=engine.samplers.evaluation,
        old_policy=engine.samplers.old_policy,
        parallel=engine.parallel,
        micro_batch=sizes.micro_batch,
        ref_policy=engine.ref_policy,
        critic=engine.critic,
        tokenizer=tokenizer,
        player=player,
        equivalence=equivalence,
        problems=problems,
        prompt_ids=checked.prompt_ids,
        max_tokens=checked.max_tokens,
        stopwatch=stopwatch,
        older_weights=engine.samplers.older,
        ahead=Ahead(engine.samplers.training, config.steps) if config.pool.engine else None,
    )


def _data_ranks(config: Config, ranks: Ranks) -> int:
    """The ranks of which each has other virtual shards.

    Raises ValueError for a process that has no ranks to share layers, rows or experts with.
    """
    spread = config.parallel
    row = spread.tensor * spread.context * spread.expert
    grid = {
        "tensor": ranks.tensor_parallel,
        "context": ranks.context_parallel,
        "expert": ranks.expert_parallel,
    }
    for name, sharing in grid.items():
        n = getattr(config.parallel, name)
        if sharing.size != n:
            raise ValueError(
                f"config: parallel.{name} ({n}) with {ranks.size} ranks: start a multiple of {row} ranks, by "
                f"torchrun --nproc-per-node {row} -m zerokl train"
            )
    return ranks.data_parallel.size


def _replicated_engine(run: EngineInputs, sizes: PassSizes, stopwatch: Stopwatch) -> Engine:
    """Whole weights in every rank."""
    config, ranks, model_config = run.config, run.ranks, run.layout.config
    weights = read_weights(run.folder, run.layout)
    flat, recompute = weights.to(run.device, DTYPES[config.dtype]), config.recompute == "layer"
    offload = Offload(config.memory.offload)
    policy = Decoder(model_config, flat, run.layout, numerics_of(config), recompute, offload)
    adapters = merge_first(config, run.own_layout, weights, policy, run.base)
    # The ranks compute shards in common rounds, so all have the same number of workers, and of shards.
    mine = _workers_of_a_rank(config, policy), sizes.shards_at_once
    n, shards = map(min, zip(*ranks.gather(lambda: mine), strict=True))
    share = shares_weights(config, run.device) and not is_separate(config)
    with ExitStack() as on_failure:  # closes what was started, unless all of it succeeds
        trained, parts = run.own_layout or run.layout, None
        if config.parallel.context > 1:
            parts = ContextParts(run.layout.config, Cutting.uncut(trained), ranks, run.device)
        part = parts and parts.part
        workers = Workers(
            policy, shards, n, config.native, share, sizes.shards_in_flight, stopwatch, adapters, part
        )
        on_failure.enter_context(workers)
        slices = Slices(trained, ranks, run.device)
        masters = whole_weights(config, adapters, policy, weights, slices)
        optimizer = Optimizer(masters, config.optimizer, run.updates)
        ref_policy = None
        if run.ref_model:
            ref_policy = _ref_policy(config, *run.ref_model, workers.n, sizes.micro_batch)
            on_failure.callback(ref_policy.close)
        samplers = make_samplers(config, run.folder, model_config, masters, workers, sizes.micro_batch)
        on_failure.pop_all()
    critic = Scorer(workers, sizes.micro_batch) if config.loss.has_critic else None
    if ranks.size == 1:
        return Engine(policy, optimizer, workers, samplers, ref_policy, critic)
    parallel = (
        CutWorkers(workers, parts, config.virtual_shards)
        if parts
        else ReplicatedWorkers(workers, slices, config.virtual_shards)
    )
    return Engine(
        policy,
        optimizer,
        parallel,
        _spread(samplers, ranks),
        RankedScorer(ref_policy, ranks) if ref_policy else None,
        RankedScorer(critic, ranks) if critic else None,
    )


@contextmanager
def run_judge(config: Config, task: Task | EnvironmentTask, ranks: Ranks = ALONE) -> Iterator[Judge]:
    """The reward of a run's task, or its environments.

    Only rank 0 has processes for them, and they end with the context. Raises ValueError (see open_judge).
    """
    with ExitStack() as stack:

        def opened() -> Judge:
            given = not config.loss.draws_answers
            opening = open_judge(task, config.task, config.environment, console.print, given)
            return stack.enter_context(opening)

        ranked = RankedEnvironments if isinstance(task, EnvironmentTask) else RankedReward
        yield opened() if ranks.size == 1 else ranked(opened, ranks)


@contextmanager
def run_equivalence(config: Config, ranks: Ranks = ALONE) -> Iterator[Equivalence | RankedEquivalence | None]:
    """What says which completions of a run mean the same; None where its loss does not ask.

    Only rank 0 has processes for it, and they end with the context. Raises ValueError (see open_equivalence).
    """
    if not config.loss.semantic_entropy:
        yield None
        return
    with ExitStack() as stack:

        def opened() -> Equivalence:
            task = config.task
            return stack.enter_context(
                open_equivalence(task.equivalence, task.reward_settings, console.print)
            )

        yield opened() if ranks.size == 1 else RankedEquivalence(opened, ranks)


def _answers(config: Config) -> GivenAnswers | DrawnAnswers | None:
    """What follows the reasonings of a run; None where it has none."""
    prefix, sampling = config.task.answer_prefix, config.sampling
    if config.loss.draws_answers:
        return DrawnAnswers(prefix, sampling.answer_max_tokens or sampling.max_tokens, config.loss.cuts)
    return GivenAnswers(prefix, sampling.sampling_params) if prefix else None


def _workers_of_a_rank(config: Config, policy: Decoder) -> int:
    """The number of processes that sample and train side by side in this rank."""
    if config.workers:
        return config.workers
    # vLLM allows nothing else to set the threads of its process. Only vllm-zerokl can run in another one.
    in_process = config.sampler.startswith("vllm") and not (
        config.sampler == "vllm-zerokl" and config.vllm.multiprocess
    )
    if in_process or policy.device.type == "cuda" or config.parallel.context > 1:
        return 1
    return automatic(policy.layout.numel)


def _spread(samplers: Samplers, ranks: Ranks) -> Samplers:
    """The samplers and scorer of one rank, each for this rank's part of the prompts."""
    old_policy = RankedScorer(samplers.old_policy, ranks) if samplers.old_policy else None
    return Samplers(
        RankedSampler(samplers.training, ranks),
        RankedSampler(samplers.evaluation, ranks),
        old_policy,
        samplers.older,
    )


def _ref_model(config: Config, model: Path, model_config: ModelConfig) -> tuple[Path, ModelConfig] | None:
    """The folder and the configuration of the frozen reference; None without one.

    Raises ValueError for a model of another vocabulary.
    """
    if not config.loss.has_reference:
        return None
    folder = resolve_model(config.loss.ref_model) if config.loss.ref_model else model
    ref_config = ModelConfig.from_file(folder)
    if ref_config.vocab_size != model_config.vocab_size:
        raise ValueError(
            f"loss.ref_model: {folder} has a vocabulary of {ref_config.vocab_size}, "
            f"the model one of {model_config.vocab_size}; name a model with the same tokenizer"
        )
    return folder, ref_config


def _ref_policy(config: Config, folder: Path, ref_config: ModelConfig, n: int, micro_batch: int) -> Scorer:
    """The frozen reference."""
    loaded = load_decoder(folder, DTYPES[config.dtype], run_device(config))
    flat = loaded.flat.detach()
    if config.precision.quantisation:
        quantise_all(loaded.layout.checkpoint_views(flat), config.precision.quantisation)
    decoder = Decoder(ref_config, flat, numerics=numerics_of(config))
    return frozen(decoder, config.virtual_shards, n, micro_batch)


def settled(config: Config) -> Config:
    """The configuration with the device in place of "auto", and with places that hold in any directory.

    Raises ValueError (see run_device).
    """
    task = config.task.model_copy(update={"directory": os.path.abspath(config.task.directory)})
    loss = config.loss.model_copy(update={"ref_model": _absolute(config.loss.ref_model)})
    changes = {
        "device": run_device(config).type,
        "model": _absolute(config.model),
        "task": task,
        "loss": loss,
        "lora": config.lora.model_copy(update={"adapter": _absolute(config.lora.adapter)}),
    }
    return config.model_copy(update=changes)


def _absolute(model: str) -> str:
    """The absolute path of a model folder; a hub name or init:PRESET as it is."""
    folder = Path(model).expanduser()
    return str(folder.absolute()) if model and folder.is_dir() else model


def run_device(config: Config) -> torch.device:
    """The run's device.

    Raises ValueError for a device that is not there, or with which the settings do not work.
    """
    device = find_device("cpu" if _needs_cpu(config) else config.device)
    check_settings(config, device.type, installed_vllm())
    return device


def on_gpu(config: Config) -> bool:
    """Whether the run's device is a GPU, as far as torch has one. It touches no GPU, unlike `run_device`."""
    return config.device != "cpu" and not _needs_cpu(config) and torch.cuda.is_available()


def _needs_cpu(config: Config) -> bool:
    """Whether the device "auto" is the CPU because vLLM is a build for CPUs."""
    return config.device == "auto" and config.sampler.startswith("vllm") and is_cpu_build()


def training_problems(task: Task | EnvironmentTask, config: Config, model: Path) -> list[Problem]:
    """The training problems of a run: at most the first task.problems of the task's training problems.

    If the model has a perfectible set, only problems of this set count (see task.perfectible_only).

    Raises ValueError for a task without training problems, or with none in this set.
    """
    problems = problems_of(task, config.task.name, "train", config.task.directory)
    perfectible = perfectible_set(model) if config.task.perfectible_only else None
    if perfectible and perfectible["task"] == config.task.name:
        prompts = set(perfectible["prompts"])
        if not prompts:
            raise ValueError(
                f"task {config.task.name}: the perfectible set of {model} is empty, as the model solves each "
                "training problem always or never; make the task harder or easier, or set "
                "task.perfectible_only = false"
            )
        problems = [problem for problem in problems if problem.prompt in prompts]
        if not problems:
            raise ValueError(
                f"task {config.task.name}: none of its training problems (options {config.task.options}) is "
                f"in the perfectible set of {model} (options {perfectible['options']}); "
                "give the same task.options, or set task.perfectible_only = false"
            )
        console.print(f"{len(problems)} training problems, the part of them in {model}'s perfectible set")
    if not problems:
        raise ValueError(f"task {config.task.name}: has no training problems")
    return problems[: config.task.problems or None]


def _check_binary(config: Config, is_binary: bool) -> None:
    """Raise ValueError where the advantage needs a reward that is 0 or 1, and this one may be graded."""
    if config.loss.advantage == "pass_at_k" and not is_binary:
        raise ValueError(
            f'loss.advantage ("pass_at_k"): the reward of task {config.task.name} does not say that it is '
            "0 or 1; set `binary = True` on it, or choose another advantage"
        )


def _check_players(prompts: int, players: int) -> None:
    """Raise ValueError where a step's prompts are not those of whole games."""
    if prompts % players:
        raise ValueError(
            f"prompts ({prompts}) must be a multiple of {players}, the players of a game: each has a prompt"
        )
