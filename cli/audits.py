"""Commands about training-inference mismatch: audit, diff, convert, record."""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ..audit.config import AuditSettings, LogFormat
from ..audit.figures.bars import BARS
from ..audit.finding import NothingToCompareError
from ..files.installed import needs_torch, needs_trainer
from ..files.reading import one_line
from ..files.writing import check_writable
from .app import CountOrAll, command
from .exit_codes import ExitCode
from .outputs import check_outputs

if TYPE_CHECKING:
    from ..audit.conclusion.outcome import Outcome
    from ..audit.report import Report
    from ..audit.run_report import RunReport

BarName = Literal[(*BARS,)]
Settings = Annotated[AuditSettings, Parameter(name="*")]
_NO_SETTINGS = AuditSettings()


@command("zerokl audit rollouts.jsonl --model MODEL --out audits/mine")
def audit(
    target: str,
    trainer_model: str = "",
    /,
    *,
    n: CountOrAll = None,
    every: int = 0,
    gradient: int = 0,
    steps: bool = False,
    bar: BarName | None = None,
    follow: bool = False,
    idle_s: int = 0,
    out: str | None = None,
    summary: str = "",
    junit: str = "",
    settings: Settings = _NO_SETTINGS,
) -> int:
    """Measure how far a sampler and a trainer are apart, where their bits part, and what causes it.

    With two models, the sampler computes with the first and the trainer with the second: `zerokl audit A B`.
    With --every, mismatch is shown against the steps of a run: `zerokl audit RUN --every 10`. With --gradient
    the gradient's bias is measured at a checkpoint: `zerokl audit RUN --gradient 8 --sampler hf`.

    The exit code is 0 when every log-probability is equal (or within the given tolerances) and no fault is
    named, and 1 when not.

    Args:
        target: Model folder or hub name; or a log of rollouts, a file or a folder of files.
        trainer_model: The trainer's model, to compare two checkpoints; by default the same.
        n: Number of completions to compare; by default 64, or all of a log that has both columns.
        every: Audit the checkpoints of a run, the target, at each step that this divides; step 0 is the model
            the run began with. 0 takes the target as a model or a log.
        gradient: Draws of each kind, 3 at least, from which the bias of a run's gradient is measured: the
            sampler's against exact ones, under each correction. The target is a run, or RUN/checkpoints/STEP;
            task, loss and prompts are the run's. 0 does not.
        steps: Compare the two columns of a log, the target, step by step. A tolerance is asked of each step.
        bar: What a project asks of a new model family at every step of a log, with --steps: its figure, bound
            and number of steps.
        follow: Read a log while a trainer writes it, and renew its report as it grows. Ends at the first line
            beyond the tolerance, which must be given, and at Ctrl-C or SIGTERM with what was read.
        idle_s: Seconds without a new line after which --follow ends; 0 does not.
        out: Folder for audit.json and audit.html; it must not hold an audit. By default audits/NAME, NAME
            being the target's, or audits/NAME-2 and so on where that exists.
        summary: File to which a summary in GitHub's Markdown is appended, such as $GITHUB_STEP_SUMMARY.
        junit: File to write in JUnit's XML: the outcome, each tolerance, each fault that is named.
    """
    from ..audit.command import free_folder, run_audit
    from ..engine.display.progress import Stages
    from ..files.http_request import is_address

    settings.tolerances.check()
    if gradient:
        _check_gradient(settings, bool(every or trainer_model or settings.model))
    if every and (trainer_model or settings.model or summary or junit):
        raise ValueError(
            "audit: --every audits the models of a run; a second model, --model, --summary and --junit do "
            "not go with it"
        )
    if steps or bar:
        _check_steps(bool(every or gradient or follow or trainer_model or settings.model or summary or junit))
    if follow or idle_s:
        _check_follow(settings, follow, idle_s, bool(every or gradient or trainer_model or settings.model))
    folder = Path(out) if out else free_folder(target)
    if (folder / "audit.json").exists():
        raise ValueError(f"audit: {folder} already holds an audit; choose another --out")
    check_writable(folder)
    check_outputs(summary, junit)
    if steps or bar:
        return _show_steps(Path(target), bar or "", settings, folder)
    if every:
        needs_trainer("audit: --every, the checkpoints of a run of zerokl")
        from ..audit.over_run import audit_run, sentences

        with Stages("audit") as stage:
            audited = audit_run(Path(target), every, n, settings, folder, stage)
        return _show_run(audited, list(sentences(audited)), folder)
    try:
        with Stages("audit") as stage:
            if is_address(settings.sampler):
                target, settings = _served(target, trainer_model, n, settings, folder, stage)
            if follow:
                report = _followed(Path(target), n, idle_s, settings, folder, stage)
            elif gradient:
                report = _with_gradient(Path(target), gradient, n, settings, stage)
            else:
                report = run_audit(target, trainer_model, n, settings, stage)
    except NothingToCompareError as error:
        print(f"zerokl: {one_line(str(error))}", file=sys.stderr)
        return ExitCode.DIFFERS
    return _show(report, folder, settings, summary, junit)


def _check_steps(other: bool) -> None:
    """Raise ValueError for what does not go with --steps. other: whether it was given."""
    if other:
        raise ValueError(
            "audit: --steps and --bar read a log's own two columns; --every, --gradient, --follow, models, "
            "--summary and --junit do not go with them"
        )


def _show_steps(log: Path, bar: str, settings: AuditSettings, folder: Path) -> int:
    """Compare the columns of a log step by step. bar: its name, or "". Returns the exit code."""
    from ..audit.over_steps import audit_steps, step_sentences
    from ..engine.display.progress import Stages

    with Stages("audit") as stage:
        stage(f"reading {log}")
        report = audit_steps(log, bar, settings.format, settings.given_params, settings.tolerances)
    return _show_run(report, list(step_sentences(report)), folder)


def _check_follow(settings: AuditSettings, follow: bool, idle_s: int, other: bool) -> None:
    """Raise ValueError for what does not go with --follow. other: whether it was given."""
    if not follow or idle_s < 0:
        raise ValueError(f"audit: idle_s ({idle_s}) goes with --follow, and must be 0 or more")
    if other:
        raise ValueError(
            "audit: --follow reads a log's own two columns; --every, --gradient and models do not go with it"
        )
    if not settings.tolerances.given:
        raise ValueError(
            "audit: --follow ends at the first line beyond a tolerance; give --band, --max_abs or --max_k3"
        )


def _followed(
    log: Path,
    n: int | None,
    idle_s: int,
    settings: AuditSettings,
    folder: Path,
    stage: Callable[[str], None],
) -> "Report":
    """The last report on a log that grows."""
    from ..audit.command import write_reports
    from ..audit.follow import Follow
    from ..engine.display.terminal import console

    stage(f"following {log}")
    report, place = Follow(log, n, settings).run(idle_s, lambda x: write_reports(x, folder), stage)
    if place:
        console.say(f"{place}: this line is beyond the tolerance; what comes after it was not read.")
    return report


def _served(
    model: str,
    trainer_model: str,
    n: int | None,
    settings: AuditSettings,
    folder: Path,
    stage: Callable[[str], None],
) -> tuple[str, AuditSettings]:
    """The log of what a server drew, in the audit's folder, and the settings with which it is audited."""
    from ..audit.config import COMPLETIONS, AuditConfig, check_draw

    if trainer_model or settings.model or settings.full_vocab or settings.batch_invariance:
        raise ValueError(
            f"audit: {settings.sampler} draws a log; a second model, --model, --full_vocab and "
            "--batch_invariance do not go with it"
        )
    needs_torch("audit: --sampler with an address")
    from ..integrations.sglang_server import draw_log

    given = settings.model_dump(exclude_unset=True)
    cfg = AuditConfig(**given | {"model": model, "n": n or COMPLETIONS})
    check_draw(cfg, "audit")
    log = folder / "rollouts.jsonl"
    draw_log(settings.sampler, cfg, log, stage)
    return str(log), AuditSettings(**{k: v for k, v in given.items() if k != "sampler"} | {"model": model})


def _check_gradient(settings: AuditSettings, other: bool) -> None:
    """Raise ValueError for what does not go with --gradient. other: whether --every or a model was given."""
    needs_trainer("audit: --gradient, the gradient of a run of zerokl")
    if other:
        raise ValueError(
            "audit: --gradient is of one checkpoint of a run; --every, a second model and --model do not go "
            "with it"
        )
    if settings.trainer != "zerokl":
        raise ValueError(
            f"audit: --gradient with trainer {settings.trainer}: zerokl computes the gradient; leave "
            "--trainer out"
        )


def _with_gradient(
    target: Path, draws: int, n: int | None, settings: AuditSettings, stage: Callable[[str], None]
) -> "Report":
    """The audit of a run's checkpoint, with the bias of its gradient. draws: of each kind.

    The audit has a process of its own: a process holds one vLLM engine, and the gradient needs it.
    """
    needs_trainer("audit: --gradient, the gradient of a run of zerokl")
    from ..audit.over_run import audit_apart
    from ..engine.runs.gradient_audit import Pair, find_target, pair_config, run_gradient_bias
    from ..verify.bias_figures import check_draws

    check_draws(draws)
    audited = find_target(target)
    config = pair_config(audited.run, Pair(settings.sampler, **vars(settings.dtypes)))
    stage(f"auditing {audited.model}")
    report = audit_apart(audited.model, n, settings)
    return replace(report, gradient=run_gradient_bias(audited, config, draws, settings.seed, stage))


def _show(report: "Report", folder: Path, settings: AuditSettings, summary: str, junit: str) -> int:
    """Write and print an audit. summary, junit: files for Markdown and XML, or "". Returns the exit code."""
    from ..audit.command import append_summary, write_junit, write_reports
    from ..audit.conclusion.verdict import verdict
    from ..audit.figures.bands import band_lines
    from ..audit.page.tables import report_tables
    from ..engine.display.terminal import console

    write_reports(report, folder)
    for table in report_tables(report):
        console.print(table)
    if summary:
        append_summary(report, settings.band, Path(summary))
    if junit:
        write_junit(report, settings.tolerances, Path(junit))
    # What is read last is what it comes to.
    for line in (*report.log_notes, *band_lines(report.corrections, settings.band), verdict(report)):
        console.say(line)
    return _end(report.outcome, folder)


def _show_run(report: "RunReport", lines: list[str], folder: Path) -> int:
    """Write and print the audits of a run's checkpoints. Returns the exit code."""
    from ..audit.command import write_json
    from ..audit.page.page import run_page
    from ..audit.page.tables import run_tables
    from ..engine.display.terminal import console

    write_json(report, folder)
    (folder / "audit.html").write_text(run_page(report, lines), encoding="utf-8")
    for table in run_tables(report):
        console.print(table)
    for line in lines:
        console.say(line)
    return _end(report.outcome, folder)


def _end(outcome: "Outcome", folder: Path) -> int:
    """Print the outcome and where the report is. Returns the exit code."""
    from ..engine.display.terminal import console

    console.print(f"outcome: {outcome.words}")
    console.print(f"report {folder / 'audit.html'}")
    return ExitCode.of(outcome.passed)


@command("zerokl diff runs/a runs/b")
def diff(a: str, b: str, /, *, resumed_at: int | None = None) -> int:
    """Name the first difference of two runs: its step, and the first quantity of this step in causal order.

    Two traces, two logs of rollouts or two files of metrics are compared as well; the framework that wrote
    them does not matter. Folders may have both: rollouts and metrics are then joined. Of a run that was
    resumed it says which state was lost, or what shows that none was.
    The exit code is 0 when both are equal to the bit, and 1 when not.

    Args:
        a: Run folder, a trace that `zerokl replay` wrote (.safetensors), a log of rollouts, a file of
            metrics (.jsonl, .json, .csv), or a folder with both.
        b: Another one of the same kind.
        resumed_at: Of logs: the first step of b after its resume, where its log has the steps before too.
    """
    from ..audit.logs.log_diff import are_logs, diff_logs

    if are_logs(Path(a), Path(b)):
        return ExitCode.of(diff_logs(Path(a), Path(b), resumed_at))
    if resumed_at is not None:
        raise ValueError("diff: --resumed_at is for logs; a ledger says where its run was resumed")
    needs_trainer("diff: two runs or two traces of zerokl")
    from ..engine.runs.checks.run_diff import diff

    return ExitCode.of(diff(Path(a), Path(b)))


@command("zerokl convert trl-log.jsonl rollouts.jsonl")
def convert(file: str, out: str = "", /, *, format: LogFormat = "auto") -> int:
    """Write a log of another framework as a log of zerokl.

    zerokl loads no pickle. Of one it prints the script that does this in the framework's own environment, and
    ends with 2: 0 says that the log was written.

    Args:
        file: Log to read, a file or a folder of files.
        out: File to write (.jsonl); it must not exist.
        format: Which framework wrote the log; auto looks at its first row.
    """
    from ..audit.logs.convert import convert

    return convert(Path(file), Path(out) if out else None, format)


@command("zerokl record --upstream http://localhost:8000 --out log.jsonl")
def record(
    *,
    upstream: str,
    out: str,
    host: str = "127.0.0.1",
    port: int = 8001,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
) -> int:
    """Stand before an inference server and log the completions that pass, until Ctrl-C. Nothing is changed.

    Clients call this address in the place of the server's. An answer is recorded where the request asks for
    token ids and log-probabilities: of vLLM return_token_ids and logprobs, of SGLang return_logprob. The exit
    code is 2 where completions were lost because the log could not be written.

    Args:
        upstream: Address of the server, such as http://localhost:8000.
        out: Log to write (.jsonl); it must not exist.
        host: Address to listen on. Whoever reaches it reaches the server.
        port: Port to listen on; 0 takes a free one.
        temperature: Of a request that names none; without it such a line has no temperature.
        top_p: Of a request that names none.
        top_k: Of a request that names none; 0 keeps all tokens.
    """
    if not find_spec("aiohttp"):
        raise ValueError("record: aiohttp is not installed; pip install aiohttp")
    from ..engine.display.terminal import console
    from ..integrations.proxy import record as serve

    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    constant = {name: value for name, value in given.items() if value is not None}
    counts = serve(upstream, Path(out), host, port, console.print, **constant)
    for line in counts.lines(Path(out)):
        console.print(line)
    return ExitCode.REFUSED if counts.lost else ExitCode.DONE
