"""A whole training run: from a configuration to a run folder."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ...kernels.philox import Stream
from ...model.checkpoint import write_checkpoint
from ...model.weights import fingerprint
from ...verify.files import first_free, hold_folder, write_whole
from ...verify.ledger import LEDGER
from ..compatibility import check_settings
from ..config import Config
from ..config_file import to_toml
from ..loss.policy_loss import surrogate
from ..parallel.ranks import Ranks, join_ranks, world_size
from ..rollout.evaluate import Evaluation, evaluate
from ..rollout.types import GenerationParams, RngKey
from ..rollout.vllm.arguments import check_engine_arguments
from ..rollout.vllm.installed import require_vllm
from ..tasks import load_reward, load_task, problems_of
from ..tasks.base import Problem, Task
from ..tasks.perfectible import TASK_FILE
from ..train.monitor import MismatchError
from ..train.recorder import Recorder
from ..train.state import StepRecord, TrainState
from ..train.step import train_step
from .base_model import base_model
from .checkpoints import restore, save_checkpoint
from .folder import NoFolder, RunFolder, plot_reward, refuse_taken
from .head import run_head
from .resume import Resumption, find_resumption
from .setup import check_prompt_lengths, make_state, with_device
from .terminal import Display, console


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
    """Run `config` into the folder `run_dir`. The one entry point of training, for the command line and from
    Python.

    Raises ValueError for bad input, MismatchError when exact and a bit differs, OSError when a file cannot be
    written.
    """
    with _ranks(config) as ranks:
        refuse_taken(Path(run_dir))
        return _run(config, Path(run_dir), None, ranks)


def resume(run_dir: str | Path, overrides: Mapping[str, Any] | None = None) -> Summary:
    """Go on with an interrupted run as if nothing had happened: the same bits, the same ledger.

    overrides: settings that decide no bit, such as {"workers": 2}. Raises as `train` does, and ValueError for
    a folder without a run, or a run whose data, weights or configuration were altered.
    """
    resumption = find_resumption(Path(run_dir), overrides or {})
    with _ranks(resumption.config) as ranks:
        for line in resumption.messages:
            console.print(line)
        start = f"from {resumption.checkpoint.folder}" if resumption.checkpoint else "the first"
        console.print(f"going on at step {resumption.step} of {resumption.config.steps}, {start}")
        return _run(resumption.config, resumption.path, resumption, ranks)


@contextmanager
def _ranks(config: Config) -> Iterator[Ranks]:
    """The ranks of this run. The processes of all but the first are silent from now on."""
    check_settings(config, ranks=world_size())
    with join_ranks() as ranks:
        console.quiet = not ranks.first
        yield ranks


def _run(config: Config, path: Path, resumption: Resumption | None, ranks: Ranks) -> Summary:
    """A new run, or the rest of one."""
    began_s = time.perf_counter()
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.sampler.startswith("vllm"):
        require_vllm()
    config = with_device(config)  # so that the run's folder names it
    check_engine_arguments(config.vllm.engine)
    task = load_task(config.task.name, config.task.options)
    # Names that cannot be imported are found before the warm start.
    load_reward(task, config.task.reward)
    surrogate(config.loss.resolve())
    ranks.barrier()  # every rank has read the folder as it was
    model = ranks.from_first(lambda: base_model(config, path))
    with closing(make_state(config, model, task, ranks)) as state, ExitStack() as folder_lock:
        history = _take_steps(state, path, model, task, resumption, folder_lock)
        summary = _summarise(state, history, time.perf_counter() - began_s)
    if ranks.first:
        write_whole(path / "summary.json", (json.dumps(vars(summary), indent=2) + "\n").encode())
        plot_reward(history, path / "reward.png")
    return summary


def _take_steps(
    state: TrainState,
    path: Path,
    model: Path,
    task: Task,
    resumption: Resumption | None,
    folder_lock: ExitStack,
) -> list[dict[str, float]]:
    """The steps that are left, with evaluations and checkpoints.

    Returns the metrics of all steps of the run.
    """
    config = state.config
    held_out = problems_of(task, config.task.name, "held_out")[: config.evaluation.problems]
    held_out = held_out if config.evaluation.every else []
    held_out_ids = state.tokenizer.encode_problems(held_out, task.chat)
    check_prompt_lengths(held_out_ids, held_out, config, state.policy.config)
    folder = _open_folder(state, path, resumption, folder_lock)
    display, history = Display(config.steps, "train"), resumption.history if resumption else []
    try:
        for _ in range(state.step, config.steps):
            record = _guarded_step(state, path)
            evaluation = {}
            last = state.step == config.steps
            if held_out and (last or state.step % config.evaluation.every == 0):
                evaluation["eval/accuracy"] = _evaluate(state, held_out, held_out_ids).mean_reward
            folder.record(record, evaluation)
            history.append(record.metrics | evaluation)
            display.step(_line(history[-1]), state.step)
            _report_overflow(state, record)
            if last or (config.checkpoint.every and state.step % config.checkpoint.every == 0):
                target = path / "checkpoints" / f"step-{state.step:06d}"
                extra = {TASK_FILE: json.dumps({"task": config.task.name, "options": config.task.options}) + "\n"}
                save_checkpoint(state, target, model, extra, folder.sync(), config.checkpoint.keep)
    finally:
        display.close()
        folder.close()
    return history


def _evaluate(state: TrainState, problems: list[Problem], prompt_ids: list[list[int]]) -> Evaluation:
    """Evaluate the current policy on held-out problems."""
    cfg = state.config
    sampling_params = cfg.sampling.sampling_params._replace(temperature=cfg.evaluation.temperature)
    generation_params = GenerationParams(
        sampling_params, cfg.evaluation.num_generations, cfg.sampling.max_tokens, state.tokenizer.stop_ids
    )
    rng_key = RngKey(cfg.seed, state.step, Stream.EVALUATE)
    return evaluate(
        state.evaluator, state.tokenizer, problems, prompt_ids, state.reward, generation_params, rng_key
    )


def _report_overflow(state: TrainState, record: StepRecord) -> None:
    if overflow := record.notes.get("scaling/overflow"):
        console.print(
            f"step {record.metrics['step']}: the gradient of {overflow} overflowed at loss scale "
            f"{record.metrics['scaling/scale']:g}; the update was skipped, the scale is now {state.scaler.scale:g}"
        )


def _open_folder(
    state: TrainState, path: Path, resumption: Resumption | None, folder_lock: ExitStack
) -> RunFolder | NoFolder:
    """The run's files, which nobody else may write until `folder_lock` is closed, and its ledger in `state`.

    A run that goes on has its state put back; its files change only after every check.
    """
    config, ledger = state.config, None
    head = run_head(state, {"workers in use": state.parallel.n, "ranks": state.ranks.size})
    if resumption is not None:
        resumption.check_head(head)
        if resumption.checkpoint:
            restore(state, resumption.checkpoint)
        state.ranks.from_first(lambda: folder_lock.enter_context(hold_folder(path)))
        state.ranks.barrier()  # nobody reads the files any more that are cut back now
        ledger = state.ranks.from_first(resumption.prepare)
    if not state.ranks.first:
        state.recorder = Recorder(None, head, config.ledger, state.optimizer, ledger)
        return NoFolder()
    folder = RunFolder(path, to_toml(config), resumption.step if resumption else None)
    if resumption is None:
        folder_lock.enter_context(hold_folder(path))
    state.recorder = Recorder(path / LEDGER, head, config.ledger, state.optimizer, ledger)
    if ledger is not None:
        last = ledger.resumed[-1]["environment"] if ledger.resumed else ledger.head.environment
        if head.environment != last:
            state.recorder.ledger.resumed(state.step, head.environment)
    return folder


def _guarded_step(state: TrainState, path: Path) -> StepRecord:
    """A step that, when bits differ, saves what is needed to look into it:

    the report and the very weights.
    """
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
    layout = state.policy.layout
    now = error.report["weight_version"] == state.version
    decoder = state.policy if now else state.old_policy.decoder
    write_checkpoint(target, layout, decoder.flat.detach(), extra={"mismatch.json": report})
    console.print(f"saved {target}: weights, rollouts and both sides' logprobs; `zerokl verify --case {target}` scores them again")


def _line(m: dict[str, float]) -> str:
    held = f"  held-out {m['eval/accuracy']:.3f}" if "eval/accuracy" in m else ""
    return (
        f"reward {m['reward/mean']:.3f}  entropy {m['entropy']:.3f}  grad {m['grad_norm']:.3g}  "
        f"mismatch {m['mismatch/max_abs']:.3g} (equal {m['mismatch/frac_equal']:.4f})  "
        f"{m['time/sample_s'] + m['time/train_s']:.2f} s{held}{_metrics_line(m, 'mismatch')}{_metrics_line(m, 'staleness')}"
    )


def _metrics_line(m: dict[str, float], what: str) -> str:
    """A line with the other metrics of mismatch or staleness, empty where no bit differs."""
    if m.get(f"{what}/frac_equal", 1.0) == 1.0:
        return ""
    names = [n for n in m if n.startswith(f"{what}/") and n not in ("mismatch/max_abs", "mismatch/frac_equal", "staleness/versions")]
    return f"\n  {what}: " + "  ".join(f"{name.removeprefix(f'{what}/')} {m[name]:.4g}" for name in names)


def _summarise(state: TrainState, history: list[dict[str, float]], seconds: float) -> Summary:
    tokens = int(sum(m["tokens"] for m in history))
    unequal = sum(round(m["tokens"] * (1 - m["mismatch/frac_equal"])) for m in history)
    layout, master = state.policy.layout, state.optimizer.collect_master()
    last = [m["reward/mean"] for m in history[-5:]]
    evaluations = [m["eval/accuracy"] for m in history if "eval/accuracy" in m]
    return Summary(
        fingerprint=state.recorder.ledger.chain,
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
