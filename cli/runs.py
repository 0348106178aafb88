"""Commands that make runs and show them: init, train, ablate, report, watch."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..engine.config.config_file import load_with_left
from ..files.reading import first_few, one_line, shown
from .app import command
from .command_line import failure_line, given_settings, toml_values
from .config_options import NO_INIT_SETTINGS, NO_SETTINGS, OfInit, Preset, Settings, TaskOptions
from .exit_codes import ExitCode

# Lines about differences that `zerokl ablate` prints; its page has all of them.
_MOST_EFFECTS = 12
# Settings that a name on the command line replaces, and a line shows.
_MOST_LEFT = 8


@command("zerokl init models/add --task add")
def init(
    out: str,
    /,
    *,
    task: str = "add",
    task_options: TaskOptions = None,
    preset: str = "tiny",
    seed: int = 0,
    settings: OfInit = NO_INIT_SETTINGS,
) -> int:
    """Make a small base model for a task, trained until it solves about half of the training prompts.

    Args:
        out: Folder to write; it must not exist.
        task: add, sort, sums, countdown, calculator, guesses, wordle, nim, or your own as module:object.
        task_options: Arguments of the task, e.g. --task.options.max_value 49.
        preset: Size of the model: mini, tiny, small, or moe, which is a mixture of experts; or a family's
            model_type, such as llama, for a tiny model of that family.
        seed: Seed of the weights and of the order of the examples.
    """
    from ..engine.display.terminal import console
    from ..engine.runs.init import initialise

    report = initialise(Path(out), task, toml_values(task_options), preset, seed, settings)
    console.print(
        f"{out}: solves {report['accuracy']:.2f} of the training prompts after {report['steps']} supervised "
        f"steps; {len(report['prompts'])} of them, solved sometimes but not always, are its perfectible set"
    )
    return 0


@command("zerokl train --preset demo --run_dir runs/mine")
def train(
    config: str | None = None,
    /,
    *,
    preset: Preset | None = None,
    run_dir: str | None = None,
    resume: str | None = None,
    auto_resume: bool = False,
    profile: int | None = None,
    settings: Settings = NO_SETTINGS,
) -> int:
    """Train by exact on-policy reinforcement learning.

    The exit code is 1 when a bit of the trainer differs from the sampler's. The run stops before the update.

    These are the settings that most runs need. `zerokl train --help loss` shows all of one section, and
    `zerokl train --help all` all of them.

    Args:
        config: TOML file.
        preset: A configuration that comes with zerokl, instead of a file.
        run_dir: Folder of the run; it must not hold a run.
        resume: Folder of an interrupted run to go on with. Only settings that decide no bit can follow.
        auto_resume: Where --run_dir holds this run already, go on with it. For torchrun and schedulers, which
            start a job again with the same command.
        profile: A step of which a torch profiler's trace is written to the folder profile of the run. It
            decides no bit.
    """
    from ..engine.display.interrupt import StoppedError
    from ..engine.runs.ending import after_interrupt, after_stop, figures, next_commands
    from ..engine.runs.run import begin_or_resume
    from ..engine.runs.run import resume as resume_run
    from ..engine.runs.run import train as start_run
    from ..engine.train.monitor import MismatchError
    from ..verify.ledger import LEDGER

    if resume and (config or preset or run_dir or auto_resume):
        raise ValueError(
            "train: --resume takes configuration and folder from the run; "
            "leave out the file, --preset, --run_dir and --auto_resume"
        )
    if not run_dir and not resume:
        raise ValueError("train: --run_dir is missing; name the folder of the run")
    overrides, folder = given_settings(settings), Path(run_dir or resume or "")
    try:
        if resume:
            summary = resume_run(resume, overrides, profile)
        else:
            loaded, left = load_with_left(config, preset, overrides)
            _print_left_behind(left, config or preset)
            start = begin_or_resume if auto_resume else start_run
            summary = start(loaded, folder, profile)
    except MismatchError as error:
        print(f"zerokl: {one_line(str(error))}", file=sys.stderr)
        _write_report(folder)
        return ExitCode.DIFFERS
    except StoppedError as stopped:
        _print_lines(after_stop(folder, stopped.step))
        raise
    except KeyboardInterrupt:
        if (folder / LEDGER).exists():
            _print_lines(after_interrupt(folder))
        raise
    _print_lines(figures(summary, folder))
    _write_report(folder)
    _print_lines(next_commands(folder))
    return 0


def _print_left_behind(settings: dict[str, Any], source: str | None) -> None:
    """Say which settings of a file or preset gave way to a name on the command line."""
    from ..engine.display.terminal import console

    if settings:
        values = [f"{key} = {shown(value)}" for key, value in settings.items()]
        console.say(f"not taken from {source}: {first_few(values, _MOST_LEFT)}")


def _print_lines(lines: Iterable[str]) -> None:
    from ..engine.display.terminal import console

    for line in lines:
        console.print(line)


@command("zerokl ablate grid.toml --out runs/grid --jobs 2")
def ablate(grid: str, /, *, out: str | None = None, jobs: int = 1) -> int:
    """Run a grid of configurations and seeds, and compare the results.

    After an interruption the same command goes on where it was. It keeps the runs that have ended.

    Args:
        grid: TOML file with seeds, [set], [grid] and [variants]; engine/runs/ablations/grid.py shows one.
        out: Folder of the runs, of ablation.json, of the whole table and of the page.
        jobs: Runs side by side, each in a process with its share of the threads. It changes no bit.
    """
    from ..engine.display.terminal import console
    from ..engine.runs.ablations.ablate import ablate
    from ..engine.runs.ablations.effects import effect_lines
    from ..engine.runs.ablations.hypotheses import hypothesis_line
    from ..engine.runs.ablations.result_table import result_table
    from ..files.reading import one_line

    if not out:
        raise ValueError("ablate: --out is missing; name the folder of the ablation")
    report = ablate(grid, out, jobs)
    if report["combinations"]:
        console.print(result_table(report["combinations"], console))
        for line in map(hypothesis_line, report["hypotheses"]):
            console.say(one_line(line))
        for line in effect_lines(report["effects"])[:_MOST_EFFECTS]:
            console.say(one_line(line))
        console.print(f"figures {Path(out) / 'ablation.json'}, the whole table beside it")
        _write_report(out)
    if failures := report["failures"]:
        folder, reason = next(iter(failures.items()))
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise ValueError(f"ablate: {folder}{more} failed: {reason}; the same command does what failed again")
    return 0


@command("zerokl report runs/a runs/b --out both.html")
def report(runs: tuple[str, ...] = (), /, *, out: str | None = None) -> int:
    """Write one HTML page about one or several runs. It needs no network and no server.

    The page has the curves of all runs, the time split of a step, the settings and where they differ, the
    ledgers and where they first differ, and every rollout with its tokens.

    Args:
        runs: Folders of runs, finished or not. The folder of an ablation stands for its runs.
        out: File to write; by default report.html in the folder, and in the working directory for several.
    """
    from ..engine.display.terminal import console
    from ..engine.runs.report.page import write_report

    console.print(f"report {write_report(runs, out)}")
    return 0


@command("zerokl watch runs/mine")
def watch(runs: tuple[str, ...] = (), /, *, port: int = 0) -> int:
    """Show the page of `zerokl report` in a browser while the runs go on. Ctrl-C ends it.

    It listens on 127.0.0.1 only. A token in the address guards it. It only reads the files of the runs.

    Args:
        runs: Folders of runs. The folder of an ablation stands for its runs.
        port: Port to listen on; 0 takes a free one.
    """
    from ..engine.runs.report.watch import watch

    return watch(runs, port)


def _write_report(folder: str | Path) -> None:
    """Write the page of a run or an ablation that has ended, and print its name. Rank 0 does it for all.

    Where it cannot be written, a line says so: what was computed is complete without it.
    """
    from ..engine.display.terminal import console
    from ..engine.runs.report.page import write_report

    if console.quiet:
        return
    try:
        console.print(f"report {write_report([folder])}")
    except (ValueError, OSError) as error:
        print(f"zerokl: no report was written: {failure_line(error)}", file=sys.stderr)
