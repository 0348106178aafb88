"""Commands about training-inference mismatch: audit, convert."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..verify.files import check_writable
from .app import Band, CountOrAll, Device, Dtype, LogFormat, command
from .exit_codes import ExitCode

if TYPE_CHECKING:
    from ..audit.audit import Audit
    from ..audit.conclusion.outcome import Outcome
    from ..audit.over_run import RunAudit


@command("zerokl audit rollouts.jsonl --model MODEL --out audits/mine")
def audit(
    target: str,
    trainer_model: str = "",
    /,
    *,
    model: str = "",
    format: LogFormat = "auto",
    sampler: str = "native",
    trainer: str = "zerokl",
    dtype: Dtype = "bfloat16",
    sampler_dtype: str = "",
    head_dtype: str = "",
    sampler_head_dtype: str = "",
    prompts: str = "",
    chat: bool = False,
    n: CountOrAll = None,
    max_tokens: int = 256,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    weight_version: int | None = None,
    checkpoints: list[str] | None = None,
    full: bool = False,
    own: int = 0,
    every: int = 0,
    against: str = "",
    device: Device = "auto",
    out: str | None = None,
    max_k3: float | None = None,
    max_abs: float | None = None,
    band: Band | None = None,
    summary: str = "",
) -> int:
    """Measure how far a sampler and a trainer are apart, where their bits part, and what causes it.

    With two models, the sampler computes with the first and the trainer with the second: `zerokl audit A B`.
    With --every, mismatch is shown against the steps of a run: `zerokl audit RUN --every 10`.

    The exit code is 0 when every log-probability is equal (or within the given tolerances) and no fault is
    named, and 1 when not.

    Args:
        target: Model folder or hub name; or a log of rollouts, a file or a folder of files.
        trainer_model: The trainer's model, to compare two checkpoints; by default the same.
        model: The model that scores a log; by default the log's own trainer column is compared.
        format: Which framework wrote the log; auto looks at its first row.
        sampler: native, hf or hf-eager (transformers' generate), vllm (stock), vllm-zerokl, or a JSONL file
            of rollouts.
        trainer: zerokl, hf (sdpa attention), hf-eager, or vllm (prompt logprobs).
        dtype: Compute dtype.
        sampler_dtype: Compute dtype of the sampler; by default the same.
        head_dtype: Dtype of the logits; by default the compute dtype.
        sampler_head_dtype: Dtype of the sampler's logits; by default head_dtype.
        prompts: Text file with one prompt in each line; by default sums such as 3+14=.
        chat: Put each prompt into the tokenizer's chat template, as a user's turn.
        n: Number of completions to compare; by default 64, or all of a log that has both columns.
        max_tokens: Tokens of a completion at most.
        temperature: Temperature, by default 1; 0 is greedy. Of a log that says none, what it was drawn with.
        top_k: Keep the k most likely tokens; 0, the default, keeps all.
        top_p: Keep the most likely tokens until their probabilities together reach this; 1, the default,
            keeps all.
        seed: Seed of the draw.
        weight_version: From a file of rollouts, take only those drawn with this version of the weights.
        checkpoints: Other weights that may have drawn a log: a model, or a folder of models such as a run's
            checkpoints. May be given several times.
        full: Compare the log-probabilities of the whole vocabulary at each place, too: the KL both ways,
            total variation, ranks.
        own: Requests at once, up to 256, with which the sampler is compared with itself: drawn alone, 2, 4, 8
            and so on at once, again, with its caches dropped, and beside long prefills. 0 does not.
        every: Audit the checkpoints of a run, the target, at each step that this divides; step 0 is the model
            the run began with. 0 takes the target as a model or a log.
        against: An earlier audit, its folder or audit.json: which of the engines' settings and versions have
            changed since, and how far the figures have.
        device: Where all engines compute; auto is a GPU where there is one.
        out: Folder for audit.json and audit.html; it must not hold an audit. By default audits/NAME, NAME
            being the target's, or audits/NAME-2 and so on where that exists.
        max_k3: Tolerance: k3 may be at most this, in nats a token.
        max_abs: Tolerance: no log-probability may differ by more than this.
        band: Tolerance: the geometric mean ratio of every sequence lies in 0.999 to 1.002 (strict), or within
            1% or 5% of 1.
        summary: File to which a summary in GitHub's Markdown is appended, such as $GITHUB_STEP_SUMMARY.
    """
    from ..audit.command import free_folder, run_audit
    from ..audit.conclusion.outcome import Tolerances
    from ..audit.config import AuditConfig
    from ..audit.over_run import audit_run
    from ..engine.runs.progress import Stages
    from ..kernels.sampling_params import SamplingParams

    tolerances = Tolerances(max_k3, max_abs, band)
    tolerances.check()
    if every and (trainer_model or model or summary):
        raise ValueError(
            "audit: --every audits the models of a run; a second model, --model and --summary do "
            "not go with it"
        )
    folder = Path(out) if out else free_folder(target)
    if (folder / "audit.json").exists():
        raise ValueError(f"audit: {folder} already holds an audit; choose another --out")
    check_writable(folder)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    given = {name: value for name, value in options.items() if value is not None}
    config = AuditConfig(
        model=model,
        trainer_model=trainer_model,
        sampler=sampler,
        format=format,
        trainer=trainer,
        dtype=dtype,
        sampler_dtype=sampler_dtype,
        head_dtype=head_dtype,
        sampler_head_dtype=sampler_head_dtype,
        prompts=prompts,
        max_tokens=max_tokens,
        sampling_params=SamplingParams(**given),
        sampling_params_given=bool(given),
        seed=seed,
        weight_version=weight_version,
        checkpoints=tuple(checkpoints or ()),
        full=full,
        chat=chat,
        against=against,
        own=own,
        device=device,
        tolerances=tolerances,
    )
    if every:
        with Stages("audit") as stage:
            of_run = audit_run(Path(target), every, n, config, folder, stage)
        return _show_run(of_run, folder)
    with Stages("audit") as stage:
        result = run_audit(target, n, config, stage)
    return _show(result, folder, band, summary)


def _show(result: "Audit", folder: Path, band: Band | None, summary: str) -> int:
    """Write and print an audit. summary: a file for the summary in Markdown, or "". Returns the exit code."""
    from ..audit.command import append_summary, write_reports
    from ..audit.conclusion.verdict import verdict
    from ..audit.figures.bands import band_lines
    from ..audit.page.tables import (
        against_table,
        hypotheses_table,
        settings_table,
        summary_table,
        worst_table,
    )
    from ..engine.runs.terminal import console

    report = result.report
    write_reports(report, folder)
    console.print(summary_table(report))
    if report["worst"]:
        console.print(worst_table(report))
        if report.get("hypotheses", {}).get("rows"):
            console.print(hypotheses_table(report))
    console.print(settings_table(report))
    if "against" in report:
        console.print(against_table(report))
    if summary:
        append_summary(result, band, Path(summary))
    for line in (verdict(report), *report["log_notes"], *band_lines(report, band)):
        console.say(line)
    return _end(result.outcome, folder)


def _end(outcome: "Outcome", folder: Path) -> int:
    """Print the outcome and where the report is. Returns the exit code."""
    from ..engine.runs.terminal import console

    console.print(f"outcome: {outcome.words}")
    console.print(f"report {folder / 'audit.html'}")
    return ExitCode.DONE if outcome.passed else ExitCode.DIFFERS


def _show_run(of_run: "RunAudit", folder: Path) -> int:
    """Write and print the audits of a run's checkpoints. Returns the exit code."""
    from ..audit.command import write_json
    from ..audit.over_run import sentences
    from ..audit.page.page import run_page
    from ..audit.page.tables import settings_table, steps_table
    from ..engine.runs.terminal import console

    words = list(sentences(of_run.report))
    write_json(of_run.report, folder)
    (folder / "audit.html").write_text(run_page(of_run.report, words), encoding="utf-8")
    console.print(steps_table(of_run.report))
    console.print(settings_table(of_run.report))
    for line in words:
        console.say(line)
    return _end(of_run.outcome, folder)


@command("zerokl convert trl-log.jsonl rollouts.jsonl")
def convert(file: str, out: str = "", /, *, format: LogFormat = "auto") -> int:
    """Write a log of another framework as a log of zerokl.

    zerokl loads no pickle. Of one it prints the script that does this in the framework's own environment.

    Args:
        file: Log to read, a file or a folder of files.
        out: File to write (.jsonl); it must not exist.
        format: Which framework wrote the log; auto looks at its first row.
    """
    from ..audit.logs.convert import convert

    return convert(Path(file), Path(out) if out else None, format)
