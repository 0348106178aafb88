"""What `zerokl audit` is given: a model or a log. And the files that it writes."""

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path

from ..engine.display.progress import silent
from ..files.inputs import append_text
from ..files.installed import needs_torch
from ..files.reading import read_toml
from ..files.writing import write_whole
from ..verify.run_files import CONFIG, ROLLOUTS
from .as_json import as_json
from .columns import audit_columns
from .conclusion.outcome import Tolerances
from .conclusion.verdict import verdict
from .config import COMPLETIONS, TRAINERS, AuditConfig, AuditSettings, check, check_requests
from .formats.registry import LOG_SUFFIXES, check_first_rows, holds_logs
from .junit import audit_cases, junit
from .page.github_summary import summary
from .page.page import page
from .report import Report
from .run_report import RunReport


def find_log(target: str) -> Path | None:
    """The log that a target names, or None where it names a model.

    A file is a log. So is a folder with logs in it that is no model's, no adapter's and no run's.
    """
    path = Path(target)
    if path.is_dir():
        names = ("config.json", "config.toml", "adapter_config.json")
        known = any((path / name).exists() for name in names)
        return path if not known and holds_logs(path) else None
    return path if path.is_file() else None


def free_folder(target: str) -> Path:
    """A folder for the report on a target that does not exist yet: audits/NAME, audits/NAME-2, and so on."""
    path = Path(target)
    name = (path.stem if path.is_file() else path.resolve().name) or "audit"
    folders = (Path("audits") / (name if i == 1 else f"{name}-{i}") for i in count(1))
    return next(folder for folder in folders if not folder.exists())


def run_audit(
    target: str,
    trainer_model: str,
    n: int | None,
    settings: AuditSettings,
    stage: Callable[[str], None] = silent,
) -> Report:
    """Audit a target: a model, or a log.

    trainer_model: the trainer's, or "" where it is the same. n: completions to compare; None is all of a log
    that has both columns, and 64 elsewhere. settings.model: the model that scores a log; empty where the
    target is the model, or where a log has a trainer column. stage: is called with what begins now, in words.
    Raises ValueError for bad input.
    """
    if n is not None and n < 1:
        raise ValueError(f"audit: n ({n}) must be at least 1")
    log = find_log(target)
    if log is None and not trainer_model:
        trainer_model, settings = _trainer_folder(settings)
    _check_exists(target, must_be_log=bool(settings.model))
    if log is None and settings.model:
        raise ValueError(f"audit: {target} is no log, so --model {settings.model} would be a second model")
    if log is not None:
        settings = _as_the_run_says(log, settings)
        _check_log(log, trainer_model, settings)
        if not settings.model:
            if settings.adapter:
                raise ValueError("audit: --adapter needs --model, the model that it is merged into")
            stage(f"reading {log}")
            version, given = settings.weight_version, settings.given_params
            return audit_columns(log, settings.format, n or 0, version, given, settings.tolerances)
    source = {"sampler": str(log)} if log else {"model": target, "trainer_model": trainer_model}
    # What was not given stays so: a default may then follow the model.
    cfg = AuditConfig(**settings.model_dump(exclude_unset=True) | source, n=n or COMPLETIONS)
    if log is not None:
        check(cfg)
        stage(f"reading the first rows of {log}")
        check_first_rows(log, settings.format)
    needs_torch("audit: --model" if log else f"audit: {target} is a model")
    from .audit import audit  # torch is loaded only where a model computes

    return audit(cfg, stage)


def _trainer_folder(settings: AuditSettings) -> tuple[str, AuditSettings]:
    """The model of a trainer that is given as a folder, and the settings with transformers as its engine."""
    if settings.trainer in TRAINERS or not Path(settings.trainer).expanduser().is_dir():
        return "", settings
    return settings.trainer, settings.model_copy(update={"trainer": "hf"})


def _as_the_run_says(log: Path, settings: AuditSettings) -> AuditSettings:
    """The settings with the sampling parameters of the run that a log is the rollouts of, unless given."""
    config = log.parent / CONFIG
    if settings.given_params or log.name != ROLLOUTS or not config.is_file():
        return settings
    try:
        sampling = read_toml(config).get("sampling", {})
    except ValueError as error:
        raise ValueError(f"audit: {config} {error}") from None
    if sampling.get("logit_bias") or sampling.get("allowed_token_ids"):  # no option of an audit says these
        return settings
    names = ("temperature", "top_k", "top_p", "min_p")
    return settings.model_copy(update={name: sampling[name] for name in names if name in sampling})


def _check_exists(target: str, must_be_log: bool) -> None:
    """Raise ValueError for a target that is not here and can be no model's name on the hub."""
    path = Path(target).expanduser()
    if path.exists():
        return
    on_hub = target.count("/") == 1 and not target.startswith((".", "/", "~"))
    if must_be_log or not on_hub or path.suffix in (*LOG_SUFFIXES, ".json"):
        told = "" if must_be_log or path.suffix in LOG_SUFFIXES else "; nor is it a model's name (owner/name)"
        raise ValueError(f"audit: {target}: no such file or folder{told}")


def _check_log(log: Path, trainer_model: str, settings: AuditSettings) -> None:
    """Raise ValueError for what does not go with a log."""
    if trainer_model:
        raise ValueError(f"audit: {log} is a log; name the model that scores it with --model")
    if settings.sampler != "native":
        raise ValueError(
            f"audit: {log} is a log, so it is the sampler; leave out --sampler {settings.sampler}"
        )
    check_requests(settings.batch_invariance, reads_log=True)


def write_reports(report: Report, folder: Path) -> None:
    """Write audit.json and audit.html of one audit. Raises OSError."""
    write_json(report, folder)
    (folder / "audit.html").write_text(page(report), encoding="utf-8")


def write_json(report: Report | RunReport, folder: Path) -> None:
    """Write audit.json, and make the folder where it is missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "audit.json").write_text(json.dumps(as_json(report), indent=1, allow_nan=False) + "\n")


def write_junit(report: Report, tolerances: Tolerances, file: Path) -> None:
    """Write the outcome, the tolerances that were given and the faults as JUnit's XML. Raises OSError."""
    held = {
        f"{name} {value}": Tolerances(**{name: value}).hold(report.figures, report.corrections)
        for name, value in asdict(tolerances).items()
        if value is not None
    }
    cases = audit_cases(report, verdict(report), held)
    write_whole(file, junit(f"zerokl audit {report.model}", cases).encode())


def append_summary(report: Report, band: str | None, file: Path) -> None:
    """Append the summary in GitHub's Markdown. A file that exists is added to: a workflow shares one."""
    append_text(file, summary(report, band))
