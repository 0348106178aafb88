"""A whole training run: from a configuration to a run folder."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ...files.reading import json_ready
from ...files.writing import first_free, hold_folder, os_error_line
from ...model.checkpoint_writing import write_checkpoint
from ...model.weights import Layout, fingerprint
from ...verify.ledger import LEDGER
from ..config.compatibility import check_settings
from ..config.run_config import Config
from ..display.interrupt import FirstInterrupt, StoppedError
from ..display.progress import Display, Field
from ..display.terminal import console
from ..rollout.pool.on_ray import require_ray
from ..rollout.vllm.arguments import check_engine_arguments
from ..rollout.vllm.installed import require_vllm
from ..tasks.loading import load_task
from ..tasks.perfectible import TASK_FILE
from ..train.ledger_recorder import Recorder
from ..train.losses.surrogate_check import check_surrogate
from ..train.monitor import MismatchError
from ..train.parallel.process_group import (
    CONTEXT_PARALLEL,
    EXPERT_PARALLEL,
    TENSOR_PARALLEL,
    Ranks,
    join_ranks,
    world_size,
)
from ..train.parallel.workers import use_threads
from ..train.state import StepRecord, TrainState
from ..train.step import train_step
from .base_model import base_model
from .evaluation import HeldOut
from .folder import NoFolder, RunFolder, refuse_taken, write_config
from .held_out import BASE_REWARD, MEAN_REWARD, held_out_name
from .ledger_head import flat_settings, run_head
from .profile import check_profiled_step, profiled
from .resume import Resumption, find_resumption, run_config
from .setup import make_state, on_gpu, run_equivalence, run_judge, settled
from .signal import no_signal_line
from .summary import Summary, summarise, write_summary
from .trackers import Trackers, require_trackers
from .trainer_state import restore, save_checkpoint

# Metrics of mismatch and staleness that the display's lines of other metrics leave out.
_NOT_LISTED = ("mismatch/max_abs", "mismatch/frac_equal", "staleness/versions")

# How long the ranks of a job's start before may hold the run's folder. They end within parts of a second
# after their torchrun (parallel/orphans.py); a machine under load takes longer.
_END_OF_RANKS_S = 30.0

_STOPPING = "Ctrl-C: the run ends after this step, with a checkpoint; Ctrl-C again ends it now"


def train(config: Config, run_dir: str | Path, profile: int | None = None) -> Summary:
    """Run `config` in the folder `run_dir`. Both the command line and Python code start training here.

    profile: the step of which a trace is written (profile.py).

    Raises ValueError for bad input, MismatchError when exact and a bit differs, OSError when a file cannot be
    written. Ctrl-C while it takes its steps raises StoppedError after the step, when there is a checkpoint; a
    second one raises KeyboardInterrupt at once.
    """
    with _ranks(config) as ranks, _held(Path(run_dir), ranks):
        refuse_taken(Path(run_dir))
        return _run(config, Path(run_dir), None, ranks, profile)


def begin_or_resume(config: Config, run_dir: str | Path, profile: int | None = None) -> Summary:
    """Run `config` in the folder `run_dir`, or go on with it where it has been begun there.

    For jobs that a scheduler starts again with the same command. Another process may hold the folder for a
    moment: ranks of the start before that still end.

    Raises what `train` and `resume` raise: ValueError where `config` is not that of the run, in what decides
    bits.
    """
    path = Path(run_dir)
    with _ranks(config) as ranks, _held(path, ranks, _END_OF_RANKS_S):
        if (path / "config.toml").exists():
            return _go_on(path, settled(config).model_dump(exclude_none=True), ranks, profile)
        refuse_taken(path)
        return _run(config, path, None, ranks, profile)


def resume(
    run_dir: str | Path, overrides: Mapping[str, Any] | None = None, profile: int | None = None
) -> Summary:
    """Go on with an interrupted run as if it had not been interrupted: the same bits, the same ledger.

    A run that is done, with all its files as it left them, stays as it is.

    overrides: settings that decide no bit, such as {"workers": 2}. profile: see `train`.

    Raises what `train` raises, and ValueError for a folder without a run, or a run whose data, weights or
    configuration were altered.
    """
    path, overrides = Path(run_dir), overrides or {}
    with _ranks(run_config(path, overrides)) as ranks, _held(path, ranks):
        return _go_on(path, overrides, ranks, profile)


def _go_on(path: Path, overrides: Mapping[str, Any], ranks: Ranks, profile: int | None) -> Summary:
    resumption = find_resumption(path, overrides)
    for line in resumption.messages:
        console.print(line)
    if resumption.summary:
        console.print(f"all {resumption.step} steps of {path} are done; nothing was changed")
        return resumption.summary
    start = f"from {resumption.checkpoint.folder}" if resumption.checkpoint else "the first"
    console.print(f"going on at step {resumption.step} of {resumption.config.steps}, {start}")
    return _run(resumption.config, path, resumption, ranks, profile)


@contextmanager
def _ranks(config: Config) -> Iterator[Ranks]:
    """The ranks of this run. From now on only rank 0 prints."""
    check_settings(config, ranks=world_size())
    spread = config.parallel
    sharing = {
        TENSOR_PARALLEL: spread.tensor,
        CONTEXT_PARALLEL: spread.context,
        EXPERT_PARALLEL: spread.expert,
    }
    with join_ranks(on_gpu(config), spread.engine == "fsdp", sharing) as ranks:
        console.quiet = not ranks.first
        yield ranks


@contextmanager
def _held(path: Path, ranks: Ranks, wait_s: float = 0.0) -> Iterator[None]:
    """The folder of a run, in which no other process may write inside this context. Rank 0 holds its lock.

    Raises ValueError in every rank where another process holds it, for longer than `wait_s` seconds.
    """
    with ExitStack() as lock:
        ranks.from_first(lambda: lock.enter_context(hold_folder(path, wait_s)))
        yield


def _run(
    config: Config, path: Path, resumption: Resumption | None, ranks: Ranks, profile: int | None
) -> Summary:
    """A new run, or the rest of an interrupted one. profile: see `train`."""
    began_s = time.perf_counter()
    check_profiled_step(profile, resumption.step if resumption else 0, config.steps)
    if config.threads:
        use_threads(config.threads)
    if config.sampler.startswith("vllm"):
        require_vllm()
    if config.pool.engine:
        require_ray()
    config = settled(config)  # the configuration in the run's folder then names device and places
    check_engine_arguments(config.vllm.engine)
    console.say(config.loss.line)
    require_trackers(config.tracking)
    task = load_task(config.task.name, config.task.options, config.task.directory)
    # Both are found wrong before the model is made: a slope that is none, a reward that cannot be imported.
    check_surrogate(config.loss, config.task.directory)
    with run_judge(config, task, ranks) as judge, run_equivalence(config, ranks) as equivalence:
        ranks.barrier()  # now every rank has read the folder, so rank 0 may change it
        model = ranks.from_first(lambda: base_model(config, path))
        with closing(make_state(config, model, task, judge, ranks, equivalence)) as state:
            held_out = HeldOut(state, task)
            if line := held_out.overlap():
                console.print(line)
            folder = _open_folder(state, path, resumption)
            with closing(folder.recorder):
                history = _take_steps(state, folder, held_out, path, model, resumption, profile)
            chain = folder.recorder.ledger.chain
            summary = _summarise(state, history, chain, time.perf_counter() - began_s)
    if ranks.first:
        write_summary(path, summary)
    return summary


def _take_steps(
    state: TrainState,
    folder: RunFolder | NoFolder,
    held_out: HeldOut,
    path: Path,
    model: Path,
    resumption: Resumption | None,
    profile: int | None,
) -> list[dict[str, float]]:
    """Take the steps that are left, with evaluations and checkpoints. profile: see `train`.

    Returns the metrics of all steps of the run.
    """
    config = state.config
    summary: dict[str, str] = {}
    history = resumption.history if resumption else []
    rewards = [m["reward/mean"] for m in history]
    try:
        if first_evaluation := held_out.base_metrics():
            name = held_out_name(state.player.binary)
            console.print(f"{name} {first_evaluation[BASE_REWARD]:.3f} before the first step")
        display = Display(config.steps, "train", state.step, ("reward", rewards))
        # Ranks end at different moments of a step, and torchrun ends those that are left: nothing can be
        # saved.
        interrupt = FirstInterrupt(lambda: display.announce(_STOPPING), wanted=state.ranks.size == 1)
        with display, interrupt:
            for _ in range(state.step, config.steps):
                with profiled(state, profile, path):
                    record = _guarded_step(state, folder.recorder, path)
                evaluation, warning = held_out.metrics()
                evaluation, last = first_evaluation | evaluation, state.step == config.steps
                first_evaluation = {}
                folder.record(record, evaluation)
                history.append(record.metrics | evaluation)
                display.step(
                    *_fields(record.metrics),
                    value=record.metrics["reward/mean"],
                    completed=state.step,
                    result=f"held-out {evaluation[MEAN_REWARD]:.3f}" if MEAN_REWARD in evaluation else "",
                )
                _report_overflow(state, record)
                if line := no_signal_line(record, history[-2] if len(history) > 1 else None):
                    console.say(line)
                if warning:
                    console.say(warning)
                stops = interrupt.seen and not last
                if last or stops or (config.checkpoint.every and state.step % config.checkpoint.every == 0):
                    _save_checkpoint(state, folder, path, model)
                if stops:
                    raise StoppedError(state.step)
        summary["fingerprint"] = folder.recorder.ledger.chain
    except (ValueError, OSError, KeyboardInterrupt) as error:
        if resumption is None and not history:
            folder.discard()
        elif isinstance(error, ValueError):
            _note_failure(folder, error)
        raise
    except (MismatchError, FloatingPointError) as error:
        _note_failure(folder, error)
        raise
    finally:
        folder.close(summary)
    return history


def _save_checkpoint(state: TrainState, folder: RunFolder | NoFolder, path: Path, model: Path) -> None:
    """Write a checkpoint of the current step to the run's folder. model: that of the run's first model."""
    task = state.config.task
    extra = {TASK_FILE: json.dumps({"task": task.name, "options": task.options}) + "\n"}
    target = path / "checkpoints" / f"step-{state.step:06d}"
    save_checkpoint(state, folder.recorder.ledger, target, model, extra, folder.sync())


def _note_failure(folder: RunFolder | NoFolder, error: Exception) -> None:
    """Write why the run ends by itself. A disk without room does not hide the error."""
    try:
        folder.fail(error)
    except OSError as disk_error:
        console.print(f"why the run ended could not be written: {os_error_line(disk_error)}")


def _report_overflow(state: TrainState, record: StepRecord) -> None:
    """Print a line for a step whose update was skipped."""
    if overflow := record.notes.get("scaling/overflow"):
        console.print(
            f"step {record.metrics['step']}: the gradient of {overflow} overflowed at loss scale "
            f"{record.metrics['scaling/scale']:g}; the update was skipped, "
            f"the scale is now {state.scaler.scale:g}"
        )


def _open_folder(state: TrainState, path: Path, resumption: Resumption | None) -> RunFolder | NoFolder:
    """Open the run's files, the ledger among them.

    For a run that goes on, the state is restored from its checkpoint. Its files change only after all checks.
    """
    config, ledger = state.config, None
    head = run_head(state, {"workers in use": state.parallel.n, "ranks": state.ranks.size})
    if resumption is not None:
        resumption.check_head(head)
        if resumption.checkpoint:
            restore(state, resumption.checkpoint)
        state.ranks.barrier()  # no rank reads the files after this, so rank 0 may cut them back
        ledger = state.ranks.from_first(resumption.prepare)
    if not state.ranks.first:
        return NoFolder(Recorder(None, head, config.ledger, state.optimizer, ledger))
    if ledger is None:
        write_config(path, config)
    with ExitStack() as on_failure:  # closes what was opened, unless all of it succeeds
        recorder = Recorder(path / LEDGER, head, config.ledger, state.optimizer, ledger)
        on_failure.callback(recorder.close)
        if ledger is not None and head.environment != ledger.environment:
            recorder.ledger.resumed(state.step, head.environment)
        if ledger is not None:  # after the ledger's note of it: a kill between the two is then no forgery
            write_config(path, config)
        done, settings = resumption.step if resumption else None, flat_settings(config)
        trackers = Trackers(config.tracking, path, config.steps, done, settings, head.environment)
        on_failure.callback(trackers.close, {})
        folder = RunFolder(path, recorder, trackers)
        on_failure.pop_all()
    return folder


def _guarded_step(state: TrainState, recorder: Recorder, path: Path) -> StepRecord:
    """Take a step. Where bits differ, save what is needed to find out why: the report and the weights.

    A ValueError, as of a reward that fails, names the step. In the first one it is a refusal of the run.
    """
    try:
        return train_step(state, recorder)
    except ValueError as error:
        if not state.step:
            raise
        raise ValueError(f"step {state.step}: {error}") from error
    except MismatchError as error:
        try:
            with state.optimizer.weights.gathered():
                current = state.optimizer.weights.whole_policy()
                if state.ranks.first:
                    names = ("mismatch" if n == 1 else f"mismatch-{n}" for n in count(1))
                    _save_mismatch(state, error, first_free(path / name for name in names), current)
        except OSError as disk_error:
            console.print(f"the rollouts and weights could not be saved: {disk_error}")
        finally:
            # torchrun ends all ranks as soon as one has ended. So all wait until rank 0 has written.
            state.ranks.barrier()
        raise


def _save_mismatch(
    state: TrainState, error: MismatchError, target: Path, current: tuple[Layout, torch.Tensor]
) -> None:
    """Write the report, and the weights that the compared logprobs are of, to the folder `target`.

    current: the policy's layout, and its weights.
    """
    report = json.dumps(json_ready(error.report) | {"config": state.config.model_dump()}, indent=2) + "\n"
    layout, flat = current
    if error.report["weight_version"] != state.version:
        flat = state.old_policy.decoder.flat.detach()
    write_checkpoint(target, layout, flat, extra={"mismatch.json": report})
    console.print(
        f"saved {target}: weights, rollouts and both sides' logprobs; "
        f"`zerokl verify --case {target}` scores them again"
    )


def _fields(metrics: dict[str, float]) -> list[list[Field]]:
    """What the display shows of every step."""
    m = metrics
    equal = m["mismatch/frac_equal"]
    mismatch = f"mismatch {m['mismatch/max_abs']:.3g} (equal {equal:.4f})"
    fields: list[Field] = [
        f"entropy {m['entropy']:.3f}",
        f"grad {m['grad_norm']:.3g}",
        mismatch if equal == 1.0 else console.text(mismatch, "bold red"),
        f"{m['time/sample_s'] + m['time/train_s']:.2f} s",
        f"{m['perf/tokens_per_s']:,.0f} tokens/s",
    ]
    return [fields, _other_metrics(m, "mismatch"), _other_metrics(m, "staleness"), _gradient_bias(m)]


def _gradient_bias(metrics: dict[str, float]) -> list[Field]:
    """The cosines with the exact gradient, in a step that measures them."""
    names = [name for name in metrics if name.startswith("gradient/") and "cosine_" in name]
    fields = [f"{name.partition('cosine_')[2]} {metrics[name]:.3f}" for name in names]
    return ["gradient's cosine:", *fields] if fields else []


def _other_metrics(metrics: dict[str, float], group: str) -> list[Field]:
    """The other metrics of a group, mismatch or staleness; none where no bit differs."""
    if metrics.get(f"{group}/frac_equal", 1.0) == 1.0:
        return []
    names = [name for name in metrics if name.startswith(f"{group}/") and name not in _NOT_LISTED]
    return [f"{group}:", *(f"{name.removeprefix(f'{group}/')} {metrics[name]:.4g}" for name in names)]


def _summarise(state: TrainState, history: list[dict[str, float]], chain: str, seconds: float) -> Summary:
    """The summary of a finished run. history: the metrics of all its steps. chain: of its ledger."""
    layout, master = state.optimizer.layout, state.optimizer.weights.collect()
    weights = state.ranks.from_first(lambda: fingerprint(layout, master))
    return summarise(history, chain, weights, seconds)
