"""The report by step: the checkpoints of a run (over_run.py), or the steps of a log (over_steps.py)."""

from dataclasses import dataclass, field

from .as_json import OPTIONAL, PART
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
    completions: int | None = field(default=None, metadata=OPTIONAL)  # of a log
    bar: float | None = field(default=None, metadata=OPTIONAL)  # the figure of the bar that was asked for


@dataclass(frozen=True)
class BarSection:
    """What a log was judged by, step by step, and what it lacks. name: of the bar, or "" without one."""

    name: str
    figure: str | None
    bound: float | None
    source: str | None
    steps_asked: int | None
    lacks: list[str]


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The audits of a run's checkpoints, or the steps of a log. The outcome is that of the worst one."""

    run: str
    model: str
    step_interval: int = field(metadata={"json": "every"})
    sampler: str
    trainer: str
    dtypes: Dtypes = field(metadata=PART)
    assumed: Assumed
    outcome: Outcome
    steps: list[Step]
    bar: BarSection | None = field(default=None, metadata=OPTIONAL)  # of a log
