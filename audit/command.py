"""What `zerokl audit` is asked to compare: two engines, a log and a model, or the two columns of a log."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from ..engine.runs.folder import finite
from ..engine.runs.progress import silent
from .audit import Audit, audit
from .columns import audit_columns
from .conclusion.outcome import Outcome
from .conclusion.verdict import verdict
from .config import AuditConfig
from .figures.batch_invariance import check_requests
from .formats.registry import holds_logs
from .page.page import write_page
from .page.summary import summary

# Completions that engines draw, or that a model scores, where nothing else is asked for.
_COMPLETIONS = 64


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


def run_audit(target: str, n: int | None, cfg: AuditConfig, stage: Callable[[str], None] = silent) -> Audit:
    """Audit a target: a model, or a log.

    n: completions to compare; None is all of a log that has both columns, and 64 elsewhere. cfg.model: the
    model that scores a log; empty where the target is the model, or where a log has a trainer column.
    stage: is called with what begins now, in words. Raises ValueError for bad input.
    """
    if n is not None and n < 1:
        raise ValueError(f"audit: n ({n}) must be at least 1")
    log = find_log(target)
    if log is None:
        if cfg.model:
            raise ValueError(f"audit: {target} is no log, so --model {cfg.model} would be a second model")
        return audit(replace(cfg, model=target, n=n or _COMPLETIONS), stage)
    if cfg.trainer_model:
        raise ValueError(f"audit: {log} is a log; name the model that scores it with --model")
    if cfg.sampler != "native":
        raise ValueError(f"audit: {log} is a log, so it is the sampler; leave out --sampler {cfg.sampler}")
    check_requests(cfg.own, of_log=True)
    if not cfg.model:
        stage(f"reading {log}")
        assumed = cfg.sampling_params if cfg.sampling_params_given else None
        columns = audit_columns(log, cfg.format, n or 0, cfg.weight_version, assumed, cfg.tolerances)
        return Audit(columns)
    return audit(replace(cfg, sampler=str(log), n=n or _COMPLETIONS), stage)


def write_reports(report: Mapping[str, Any], folder: Path) -> None:
    """Write audit.json and audit.html of one audit. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(report, folder)
    write_page(report, folder / "audit.html")


def write_json(report: Mapping[str, Any], folder: Path) -> None:
    """Write audit.json. Raises OSError."""
    (folder / "audit.json").write_text(json.dumps(finite(_as_json(report)), indent=1, allow_nan=False) + "\n")


def _as_json(value: Any) -> Any:
    """A report with every outcome in it as JSON."""
    if isinstance(value, Outcome):
        return value.as_json()
    if isinstance(value, Mapping):
        return {name: _as_json(x) for name, x in value.items()}
    return [_as_json(x) for x in value] if isinstance(value, list | tuple) else value


def append_summary(result: Audit, band: str | None, file: Path) -> None:
    """Append the summary in GitHub's Markdown. A file that exists is added to: a workflow shares one."""
    with open(file, "a", encoding="utf-8") as out:
        out.write(summary(result.report, verdict(result.report), result.outcome, band))
