"""The report over the checkpoints of a run: each one's audit in a row (over_run.py)."""

from dataclasses import dataclass, field

from .as_json import PART
from .conclusion.outcome import Outcome
from .figures.measure import Estimate
from .finding import Finding
from .settings import Assumed, Dtypes


@dataclass(frozen=True)
class Step:
    """What the report says of one checkpoint."""

    step: int
    outcome: Outcome
    tokens: int
    frac_equal: float
    max_abs: float
    k1: Estimate
    k3: Estimate
    perplexity_sampler: float
    perplexity_trainer: float
    bits_part_at: str | None
    error_jumps_at: str | None
    cause: Finding


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The audits of a run's checkpoints. The outcome is that of the worst one."""

    run: str
    model: str
    step_interval: int = field(metadata={"json": "every"})
    sampler: str
    trainer: str
    dtypes: Dtypes = field(metadata=PART)
    assumed: Assumed
    outcome: Outcome
    steps: list[Step]
