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

# Metrics of mismatch and staleness that the display's lines of other metrics leave out.
_NOT_LISTED = ("mismatch/max_abs", "mismatch/frac_equal", "staleness/versions")


@dataclass(frozen=True)
class Summary:
    """How a run ended; the content of summary.json."""

    fingerprint: str  # the last chain value of the ledger: the hash of everything that the run computed
    weights: str  # the hash of the final weights alone
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
    """Run `config` in the folder `run_dir`. Both the command line and Python code start training here.

    Raises ValueError for bad input, MismatchError when exact and a bit differs, OSError when a file cannot be
    written.
    """
    with _ranks(config) as ranks:
        refuse_taken(Path(run_dir))
        return _run(config, Path(run_dir), None, ranks)


def resume(run_dir: str | Path, overrides: Mapping[str, Any] | None = None) -> Summary:
    """Go on with an interrupted run as if it had not been interrupted: the same bits, the same ledger.

    overrides: settings that decide no bit, such as {"workers": 2}.

    Raises what `train` raises, and ValueError for a folder without a run, or a run whose data, weights or
    configuration were altered.
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
    """The ranks of this run. From now on only rank 0 prints."""
    check_settings(config, ranks=world_size())
    with join_ranks() as ranks:
        console.quiet = not ranks.first
        yield ranks


def _run(config: Config, path: Path, resumption: Resumption | None, ranks: Ranks) -> Summary:
    """A new run, or the rest of an interrupted one."""
    began_s = time.perf_counter()
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.sampler.startswith("vllm"):
        require_vllm()
    config = with_device(config)  # the configuration in the run's folder then names the device
    check_engine_arguments(config.vllm.engine)
    task = load_task(config.task.name, config.task.options)
    # Both are loaded here so that a name that cannot be imported is found before the model is made.
    load_reward(task, config.task.reward)
    surrogate(config.loss.resolve())
    ranks.barrier()  # now every rank has read the folder, so rank 0 may change it
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
    """Take the steps that are left, with evaluations and checkpoints.

    folder_lock: keeps other processes from writing to the folder until it is closed.
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
                task_json = json.dumps({"task": config.task.name, "options": config.task.options})
                extra = {TASK_FILE: task_json + "\n"}
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
    """Print a line for a step whose update was skipped."""
    if overflow := record.notes.get("scaling/overflow"):
        console.print(
            f"step {record.metrics['step']}: the gradient of {overflow} overflowed at loss scale "
            f"{record.metrics['scaling/scale']:g}; the update was skipped, "
            f"the scale is now {state.scaler.scale:g}"
        )


def _open_folder(
    state: TrainState, path: Path, resumption: Resumption | None, folder_lock: ExitStack
) -> RunFolder | NoFolder:
    """Open the run's files, and put a Recorder for its ledger into `state`.

    For a run that goes on, the state is restored from its checkpoint. Its files change only after all checks.
    No other process may write to the folder until `folder_lock` is closed.
    """
    config, ledger = state.config, None
    head = run_head(state, {"workers in use": state.parallel.n, "ranks": state.ranks.size})
    if resumption is not None:
        resumption.check_head(head)
        if resumption.checkpoint:
            restore(state, resumption.checkpoint)
        state.ranks.from_first(lambda: folder_lock.enter_context(hold_folder(path)))
        state.ranks.barrier()  # no rank reads the files after this, so rank 0 may cut them back
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
    """Take a step. Where bits differ, save what is needed to find out why: the report and the weights."""
    try:
        return train_step(state)
    except MismatchError as error:
        try:
            if state.ranks.first:
                names = ("mismatch" if n == 1 else f"mismatch-{n}" for n in count(1))
                _save_mismatch(state, error, first_free(path / name for name in names))
        except OSError as disk_error:
            console.print(f"the rollouts and weights could not be saved: {disk_error}")
        finally:
            # torchrun ends all ranks as soon as one has ended. So all wait until rank 0 has written.
            state.ranks.barrier()
        raise


def _save_mismatch(state: TrainState, error: MismatchError, target: Path) -> None:
    """Write the report, and the weights that the compared logprobs are of, to the folder `target`."""
    report = json.dumps(error.report | {"config": state.config.model_dump()}, indent=2) + "\n"
    layout = state.policy.layout
    is_current = error.report["weight_version"] == state.version
    decoder = state.policy if is_current else state.old_policy.decoder
    write_checkpoint(target, layout, decoder.flat.detach(), extra={"mismatch.json": report})
    console.print(
        f"saved {target}: weights, rollouts and both sides' logprobs; "
        f"`zerokl verify --case {target}` scores them again"
    )


def _line(metrics: dict[str, float]) -> str:
    """What the display shows of a step."""
    m = metrics
    held_out = f"  held-out {m['eval/accuracy']:.3f}" if "eval/accuracy" in m else ""
    return (
        f"reward {m['reward/mean']:.3f}  entropy {m['entropy']:.3f}  grad {m['grad_norm']:.3g}  "
        f"mismatch {m['mismatch/max_abs']:.3g} (equal {m['mismatch/frac_equal']:.4f})  "
        f"{m['time/sample_s'] + m['time/train_s']:.2f} s{held_out}"
        f"{_metrics_line(m, 'mismatch')}{_metrics_line(m, 'staleness')}"
    )


def _metrics_line(metrics: dict[str, float], group: str) -> str:
    """A line with the other metrics of a group, mismatch or staleness; empty where no bit differs."""
    if metrics.get(f"{group}/frac_equal", 1.0) == 1.0:
        return ""
    names = [name for name in metrics if name.startswith(f"{group}/") and name not in _NOT_LISTED]
    values = (f"{name.removeprefix(f'{group}/')} {metrics[name]:.4g}" for name in names)
    return f"\n  {group}: " + "  ".join(values)


def _summarise(state: TrainState, history: list[dict[str, float]], seconds: float) -> Summary:
    """The summary of a finished run. history: the metrics of all its steps."""
    tokens = int(sum(m["tokens"] for m in history))
    unequal = sum(round(m["tokens"] * (1 - m["mismatch/frac_equal"])) for m in history)
    layout, master = state.policy.layout, state.optimizer.collect_master()
    last_rewards = [m["reward/mean"] for m in history[-5:]]
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
        reward_last5=sum(last_rewards) / len(last_rewards),
        held_out_accuracy=evaluations[-1] if evaluations else None,
        seconds=seconds,
    )
