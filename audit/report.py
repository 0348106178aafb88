"""The report of an audit: what was measured, and what follows from it. as_json.py makes audit.json of it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ..verify.bias_figures import DrawnBias
from .as_json import OPTIONAL, OPTIONAL_PART, PART
from .changes_since import Since
from .conclusion.outcome import Outcome
from .figures.bands import Corrections
from .figures.measure import Figures, WorstToken
from .finding import Finding
from .log_section import LogSection
from .page.token_texts import TokenTexts
from .sections import (
    BatchInvariance,
    CacheSection,
    EngineSection,
    FullVocab,
    TraceSection,
    WayFigures,
)
from .settings import Assumed, Dtypes


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What an audit measured. A section that is None does not belong to this audit, or was not asked for."""

    model: str
    trainer_model: str | None = None  # where it is another one
    sampler: str
    trainer: str
    dtypes: Dtypes = field(metadata=PART)
    engines: EngineSection | None = field(default=None, metadata=OPTIONAL_PART)
    log: LogSection | None = field(default=None, metadata=OPTIONAL_PART)
    log_notes: list[str]
    assumed: Assumed
    figures: Figures = field(metadata=PART)
    worst: list[WorstToken]
    token_texts: TokenTexts
    corrections: Corrections
    own_invariance: dict[str, dict[str, WayFigures]]  # by engine and way
    trace: TraceSection | None = field(default=None, metadata=OPTIONAL_PART)
    caches: CacheSection | None = field(default=None, metadata=OPTIONAL_PART)
    full_vocab: FullVocab | None = field(default=None, metadata=OPTIONAL)
    batch_invariance: BatchInvariance | None = field(default=None, metadata=OPTIONAL)
    # of a checkpoint of a run, where it was asked for
    gradient: DrawnBias | None = field(default=None, metadata=OPTIONAL)
    # an earlier audit
    against: Since | None = field(default=None, metadata=OPTIONAL)

    @property
    def columns_alone(self) -> bool:
        """Whether both columns are the log's, and no model was at hand."""
        return self.log is not None and self.engines is None


class Shown(NamedTuple):
    """Two sides by name, and their figures and tokens."""

    sampler: str
    trainer: str
    figures: Figures
    worst: list[WorstToken]
    token_texts: TokenTexts


@dataclass(frozen=True, kw_only=True)
class Report(Measurements):
    """What an audit measured, and what it concludes."""

    outcome: Outcome
    cause: Finding
    notes: list[str]

    @property
    def is_of_columns(self) -> bool:
        """Whether the cause is of the log's own two columns, though a model is at hand."""
        return bool(self.cause.trainer_column and self.log.columns)

    @property
    def shown(self) -> Shown:
        """The sides that headline, figures and tokens speak of: those that the cause is about."""
        if self.is_of_columns:
            columns = self.log.columns
            sides = f"the sampler's column of {self.sampler}", "its trainer's column"
            return Shown(*sides, columns.figures, columns.worst, columns.token_texts)
        return Shown(self.sampler, self.trainer, self.figures, self.worst, self.token_texts)
