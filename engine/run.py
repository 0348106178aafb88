"""A whole training run: from a configuration to a run folder."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from ..kernels import tiles
from ..kernels.backend import find_device
from ..model.checkpoint import DTYPES, load_decoder, read_weights, resolve_model, write_checkpoint
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.weights import Layout, fingerprint
from ..verify.files import first_free, hold_folder, write_whole
from ..verify.ledger import LEDGER
from .checkpoints import restore, save_checkpoint
from .config import Config, to_toml
from .initialise import TASK_FILE, initialise, perfectible_set
from .learner import Learner
from .loop import StepRecord, TrainState, held_out, train_step
from .monitor import MismatchError
from .ranked import RankedSampler, RankedScorer, RankedWorkers, shards_at_once
from .ranks import ALONE, Ranks, join_ranks
from .record import Recorder, run_head
from .report import Display, NoFolder, RunFolder, console, plot_reward, refuse_taken
from .resume import Resumption, find_resumption
from .samplers import check_device, make_samplers
from .scaling import LossScaler
from .scorer import Scorer, frozen
from .slices import Slices
from .tasks import load_reward, load_task, problems_of
from .tasks.base import Problem, Task
from .text import Text
from .vllm.sampler import check_engine_arguments, is_cpu_build, require_vllm
from .workers import Workers, automatic


@dataclass(frozen=True)
class Summary:
    """How a run ended; summary.json."""

    fingerprint: str  # the ledger's last chain value: of everything the run computed
    weights: str  # of the final weights alone
    steps: int
    tokens: int
    tokens_unequal: int
    mismatch_max_abs: float
    reward_first: float
    reward_last: float
    reward_last5: float
    held_out_accuracy: float | None
    seconds: float


def train(config: Config, run_dir: str | Path) -> Summary:
    """Run `config` into the folder `run_dir`. The one entry point of training, for the command line and from Python.

    Raises ValueError for bad input, MismatchError when exact and a bit differs, OSError when a file cannot be written.
    """
    with _ranks(config) as ranks:
        refuse_taken(Path(run_dir))
        return _run(config, Path(run_dir), None, ranks)


def resume(run_dir: str | Path, overrides: Mapping[str, str] | None = None) -> Summary:
    """Go on with an interrupted run as if nothing had happened: the same bits, the same ledger.

    overrides: settings that decide no bit, such as {"workers": "2"}. Raises as `train` does, and ValueError for a folder without a
    run, or a run whose data, weights or configuration were altered.
    """
    at = find_resumption(Path(run_dir), overrides or {})
    with _ranks(at.config) as ranks:
        for line in at.said:
            console.print(line)
        start = f"from {at.checkpoint.folder}" if at.checkpoint else "the first"
        console.print(f"going on at step {at.step} of {at.config.steps}, {start}")
        return _run(at.config, at.path, at, ranks)


@contextmanager
def _ranks(config: Config) -> Iterator[Ranks]:
    """The ranks of this run. The processes of all but the first are silent from now on."""
    with join_ranks(config.virtual_shards, config.sampler) as ranks:
        console.quiet = not ranks.first
        yield ranks


def _run(config: Config, path: Path, at: Resumption | None, ranks: Ranks) -> Summary:
    """A new run, or the rest of one."""
    began = time.perf_counter()
    if config.threads:
        torch.set_num_threads(config.threads)
    config = with_device(config)  # so that the run's folder names it
    if config.sampler.startswith("vllm"):  # said before the warm start
        require_vllm()
        check_engine_arguments(config.vllm.engine)
    task = load_task(config.task.name, config.task.options)
    load_reward(task, config.task.reward)  # a name that cannot be imported is found before the warm start
    ranks.barrier()  # every rank has read the folder as it was
    model = ranks.from_first(lambda: base_model(config, path))
    with closing(make_state(config, model, task, ranks)) as state, ExitStack() as held_folder:
        history = _take_steps(state, path, model, task, at, held_folder)
        summary = _summarise(state, history, time.perf_counter() - began)
    if ranks.first:
        write_whole(path / "summary.json", (json.dumps(vars(summary), indent=2) + "\n").encode())
        plot_reward(history, path / "reward.png")
    return summary


def _take_steps(
    state: TrainState, path: Path, model: Path, task: Task, at: Resumption | None, held_folder: ExitStack
) -> list[dict[str, float]]:
    """The steps that are left, with evaluations and checkpoints. Returns the metrics of all steps of the run."""
    config = state.config
    held = problems_of(task, config.task.name, "held_out")[: config.evaluation.problems] if config.evaluation.every else []
    held_ids = state.text.encode_problems(held, task.chat)
    _check_prompts(held_ids, held, config, state.policy.config)
    folder = _open_folder(state, path, at, held_folder)
    display, history = Display(config.steps, "train"), at.history if at else []
    try:
        for _ in range(state.step, config.steps):
            record = _guarded_step(state, path)
            evaluated = {}
            last = state.step == config.steps
            if held and (last or state.step % config.evaluation.every == 0):
                evaluated["eval/accuracy"] = held_out(state, held, held_ids).mean_reward
            folder.record(record, evaluated)
            history.append(record.metrics | evaluated)
            display.step(_line(history[-1]), state.step)
            if overflow := record.notes.get("scaling/overflow"):
                console.print(
                    f"step {record.metrics['step']}: the gradient of {overflow} overflowed at loss scale "
                    f"{record.metrics['scaling/scale']:g}; the update was skipped, the scale is now {state.scaler.scale:g}"
                )
            if last or (config.checkpoint.every and state.step % config.checkpoint.every == 0):
                target = path / "checkpoints" / f"step-{state.step:06d}"
                extra = {TASK_FILE: json.dumps({"task": config.task.name, "options": config.task.options}) + "\n"}
                save_checkpoint(state, target, model, extra, folder.sync(), config.checkpoint.keep)
    finally:
        display.close()
        folder.close()
    return history


def _open_folder(state: TrainState, path: Path, at: Resumption | None, held_folder: ExitStack) -> RunFolder | NoFolder:
    """The run's files, which nobody else may write until `held_folder` is closed, and its ledger in `state`.

    A run that goes on has its state put back; its files change only after every check.
    """
    config = state.config
    head = run_head(state, {"workers in use": state.workers.n, "ranks": state.ranks.size})
    found = None
    if at is not None:
        at.check_head(head)
        if at.checkpoint:
            restore(state, at.checkpoint)
        state.ranks.from_first(lambda: held_folder.enter_context(hold_folder(path)))
        state.ranks.barrier()  # nobody reads the files any more that are cut back now
        found = state.ranks.from_first(at.prepare)
    if not state.ranks.first:
        state.ledger = Recorder(None, head, config, found)
        return NoFolder()
    folder = RunFolder(path, to_toml(config), at.step if at else None)
    if at is None:
        held_folder.enter_context(hold_folder(path))
    state.ledger = Recorder(path / LEDGER, head, config, found)
    if found is not None:
        last = found.resumed[-1]["environment"] if found.resumed else found.head.environment
        if head.environment != last:
            state.ledger.ledger.resumed(state.step, head.environment)
    return folder


def make_state(config: Config, model: Path, task: Task, ranks: Ranks = ALONE) -> TrainState:
    """Load a model folder and set up everything a step needs, for one of `ranks`. Raises ValueError."""
    model_config = ModelConfig.from_file(model)
    text = Text(model, model_config.vocab_size)
    problems = training_problems(task, config, model)
    prompt_ids = text.encode_problems(problems, task.chat)
    _check_prompts(prompt_ids, problems, config, model_config)
    device = _device(config)
    tiles.follow(config.precision.tiles)
    layout = Layout(model_config)
    weights = read_weights(model, layout)
    policy = Decoder(model_config, weights.to(device, DTYPES[config.dtype]), layout, config.precision.numerics())
    updates = config.steps * config.updates_per_rollout
    vllm = config.sampler == "vllm"
    alone = (vllm and not config.vllm.multiprocess) or config.sampler == "vllm-stock"  # vLLM keeps the threads of its process to itself
    n = config.workers or (1 if alone or device.type == "cuda" else automatic(policy.layout.numel))
    n = min(ranks.gather(lambda: n))  # the ranks do the same rounds, whatever threads each has
    with ExitStack() as undone:  # unless all of it succeeds
        shards = shards_at_once(config.virtual_shards, ranks.size, n)
        workers = undone.enter_context(Workers(policy, shards, n, config.native, share=vllm and device.type == "cpu"))
        slices = Slices(layout, ranks, device)
        learner = Learner(policy, weights, config.optimizer, updates, slices)
        reference, reward = _reference(config, model, model_config, workers.n), load_reward(task, config.task.reward)
        if reference:
            undone.callback(reference.close)
        samplers = make_samplers(config, model, model_config, learner, workers)
        undone.pop_all()
    sampler, evaluator, behaviour = samplers.training, samplers.evaluation, samplers.behaviour
    if ranks.size > 1:
        sampler, evaluator = RankedSampler(sampler, ranks), RankedSampler(evaluator, ranks)
        workers = RankedWorkers(workers, slices, config.virtual_shards)
        behaviour, reference = (RankedScorer(x, ranks) if x else None for x in (behaviour, reference))
    return TrainState(
        config, policy, learner, LossScaler(config.precision, policy.dtype), sampler, evaluator, behaviour, workers, reference, text,
        reward, problems, prompt_ids,
    )  # fmt: skip


def _reference(config: Config, model: Path, model_config: ModelConfig, n: int) -> Scorer | None:
    """The frozen reference of the KL term, if there is one. Raises ValueError for a model of another vocabulary."""
    if not config.loss.kl_coef:
        return None
    folder = resolve_model(config.loss.reference) if config.loss.reference else model
    theirs = ModelConfig.from_file(folder)
    if theirs.vocab_size != model_config.vocab_size:
        raise ValueError(
            f"loss.reference: {folder} has a vocabulary of {theirs.vocab_size}, the model one of {model_config.vocab_size}; "
            "name a model with the same tokenizer"
        )
    flat = load_decoder(folder, DTYPES[config.dtype], _device(config)).flat.detach()
    return frozen(Decoder(theirs, flat, numerics=config.precision.numerics()), config.virtual_shards, n, config.micro_batch)


def with_device(config: Config) -> Config:
    """The configuration with the device that auto stands for. Raises ValueError (see _device)."""
    return config.model_copy(update={"device": _device(config).type})


def _device(config: Config) -> torch.device:
    """The run's device. Raises ValueError for one that is not there, or that a setting does not work with."""
    on_cpu = config.device == "auto" and config.sampler.startswith("vllm") and is_cpu_build()
    device = find_device("cpu" if on_cpu else config.device)
    check_device(config, device.type)
    if device.type == "cuda" and config.workers > 1:
        raise ValueError(f"workers ({config.workers}) must be 0 or 1 on a GPU, which one process keeps busy")
    return device


def training_problems(task: Task, config: Config, model: Path) -> list[Problem]:
    """The first task.problems of the task's training problems, or of those in the model's perfectible set, if it has one with any of them.

    Raises ValueError for a task without problems, or none in that set.
    """
    problems = problems_of(task, config.task.name, "train")
    found = perfectible_set(model) if config.task.perfectible_only else None
    if found and found["task"] == config.task.name:
        prompts = set(found["prompts"])
        kept = [p for p in problems if p.prompt in prompts]
        if not kept:
            raise ValueError(
                f"task {config.task.name}: none of its training problems (options {config.task.options}) is in the perfectible set "
                f"of {model} (options {found['options']}); give the same task.options, or set task.perfectible_only = false"
            )
        problems = kept
        console.print(f"{len(problems)} training problems, the part of them in {model}'s perfectible set")
    if not problems:
        raise ValueError(f"task {config.task.name}: has no training problems")
    return problems[: config.task.problems or None]


def _check_prompts(prompt_ids: list[list[int]], problems: list[Problem], config: Config, model: ModelConfig) -> None:
    for ids, problem in zip(prompt_ids, problems, strict=True):
        if len(ids) + config.sampling.max_tokens > model.max_positions:
            raise ValueError(
                f"task: the prompt of problem {problem.id} has {len(ids)} tokens; with sampling.max_tokens ({config.sampling.max_tokens}) "
                f"that is more than the model's context ({model.max_positions}); shorten it or lower sampling.max_tokens"
            )


def base_model(config: Config, path: Path) -> Path:
    """The model folder of a run; `init:PRESET` makes one in the run folder."""
    if config.model.startswith("init:"):
        base = path / "base"
        if not is_base(base, config):  # else of a run that stopped before its first step: the same model, made once
            make_base(base, config)
        return base
    return resolve_model(config.model)


def make_base(base: Path, config: Config) -> None:
    """Make the model that config.model (init:PRESET) asks for in the folder `base`. Raises ValueError."""
    initialise(base, config.task.name, config.task.options, config.model.removeprefix("init:"), config.seed)


def is_base(base: Path, config: Config) -> bool:
    """Whether the folder holds what `make_base` would make there."""
    preset = config.model.removeprefix("init:")
    wanted = {"task": config.task.name, "options": config.task.options, "preset": preset, "seed": config.seed}
    found = perfectible_set(base)
    return bool(found) and all(found[k] == v for k, v in wanted.items())


def _guarded_step(state: TrainState, path: Path) -> StepRecord:
    """A step that, when bits differ, saves what is needed to look into it: the report and the very weights."""
    try:
        return train_step(state)
    except MismatchError as error:
        try:
            if state.ranks.first:
                _save_mismatch(state, error, first_free(path / (f"mismatch-{n}" if n > 1 else "mismatch") for n in count(1)))
        except OSError as full:
            console.print(f"the rollouts and weights could not be saved: {full}")
        finally:
            state.ranks.barrier()  # torchrun ends all ranks as soon as one has ended: none does before the first has written
        raise


def _save_mismatch(state: TrainState, error: MismatchError, target: Path) -> None:
    report = json.dumps(error.report | {"config": state.config.model_dump()}, indent=2) + "\n"
    layout: Layout = state.policy.layout
    now = error.report["weight_version"] == state.version
    decoder = state.policy if now else state.behaviour.decoder
    write_checkpoint(target, layout, decoder.flat.detach(), extra={"mismatch.json": report})
    console.print(f"saved {target}: weights, rollouts and both sides' logprobs; `zerokl verify --case {target}` scores them again")


def _line(m: dict[str, float]) -> str:
    held = f"  held-out {m['eval/accuracy']:.3f}" if "eval/accuracy" in m else ""
    return (
        f"reward {m['reward/mean']:.3f}  entropy {m['entropy']:.3f}  grad {m['grad_norm']:.3g}  "
        f"mismatch {m['mismatch/max_abs']:.3g} (equal {m['mismatch/frac_equal']:.4f})  "
        f"{m['time/sample_s'] + m['time/train_s']:.2f} s{held}{_apart(m, 'mismatch')}{_apart(m, 'staleness')}"
    )


def _apart(m: dict[str, float], what: str) -> str:
    """A line with the other metrics of mismatch or staleness, empty where no bit differs."""
    if m.get(f"{what}/frac_equal", 1.0) == 1.0:
        return ""
    names = [n for n in m if n.startswith(f"{what}/") and n not in ("mismatch/max_abs", "mismatch/frac_equal", "staleness/versions")]
    return f"\n  {what}: " + "  ".join(f"{name.removeprefix(f'{what}/')} {m[name]:.4g}" for name in names)


def _summarise(state: TrainState, history: list[dict[str, float]], seconds: float) -> Summary:
    tokens = int(sum(m["tokens"] for m in history))
    unequal = sum(round(m["tokens"] * (1 - m["mismatch/frac_equal"])) for m in history)
    layout, master = state.policy.layout, state.learner.collect_master()
    last = [m["reward/mean"] for m in history[-5:]]
    evaluations = [m["eval/accuracy"] for m in history if "eval/accuracy" in m]
    return Summary(
        fingerprint=state.ledger.ledger.chain,
        weights=state.ranks.from_first(lambda: fingerprint(layout, master)),
        steps=len(history),
        tokens=tokens,
        tokens_unequal=unequal,
        mismatch_max_abs=max(m["mismatch/max_abs"] for m in history),
        reward_first=history[0]["reward/mean"],
        reward_last=history[-1]["reward/mean"],
        reward_last5=sum(last) / len(last),
        held_out_accuracy=evaluations[-1] if evaluations else None,
        seconds=seconds,
    )
