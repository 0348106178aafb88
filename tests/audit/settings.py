"""Audits as tests name them, and their reports as audit.json has them."""

from pathlib import Path
from typing import Any

from zerokl.audit.as_json import as_json
from zerokl.audit.audit import audit
from zerokl.audit.columns import audit_columns
from zerokl.audit.config import AuditConfig
from zerokl.kernels.sampling_params import SamplingParams


def audit_config(
    model: str,
    sampler: str = "native",
    trainer: str = "zerokl",
    dtype: str = "bfloat16",
    sampling_params: SamplingParams | None = None,
    **more: Any,
) -> AuditConfig:
    """The settings of an audit."""
    names = ("temperature", "top_k", "top_p", "min_p")
    given = {name: getattr(sampling_params, name) for name in names} if sampling_params else {}
    return AuditConfig(model=model, sampler=sampler, trainer=trainer, dtype=dtype, **given, **more)


def audit_json(cfg: AuditConfig) -> dict[str, Any]:
    """The report of an audit, as JSON."""
    return as_json(audit(cfg))


def columns_json(log: Path, **options: Any) -> dict[str, Any]:
    """The report on the two columns of a log, as JSON."""
    return as_json(audit_columns(log, **options))
