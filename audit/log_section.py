"""The section of a report about a log."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .as_json import OPTIONAL
from .faults.fault import LogFault
from .faults.ids import doubled_lines
from .figures.drawn_from import Distribution
from .figures.measure import Figures, WorstToken
from .hypotheses.signal_checks import Signal
from .hypotheses.tried import Tried
from .hypotheses.value_checks import NoLogprobs
from .page.token_texts import TokenTexts

if TYPE_CHECKING:
    from .sections import ExpertsDifference


@dataclass(frozen=True)
class Rounding:
    """How far the numbers of a log were cut, and what this does not explain."""

    decimals: int  # the fewest that a line keeps
    tolerance: float  # half of the last decimal of each rounded side, in nats
    tokens_beyond: int  # tokens that differ by more


@dataclass(frozen=True, kw_only=True)
class TrainerColumn(Tried):
    """The log's own trainer column beside a model, and beside the sampler's column."""

    distribution: Distribution


@dataclass(frozen=True)
class TwoColumns:
    """The log's own two columns, compared as the two sides of an audit are."""

    figures: Figures
    worst: list[WorstToken]
    token_texts: TokenTexts


@dataclass(frozen=True)
class VersionFigures:
    """The figures of one weight version; -1 stands for tokens of an unknown one."""

    weight_version: int
    tokens: int
    frac_equal: float
    max_abs: float
    k3: float


@dataclass(frozen=True)
class LogSection:
    """What a log says, and what may have gone wrong with it."""

    # completions and drawn tokens in the file, of the weight version that was asked for
    logged: int
    drawn_tokens: int
    no_logprobs: list[NoLogprobs]
    signal: Signal
    distribution: Distribution
    hypotheses: Tried
    log_faults: list[LogFault] = field(metadata={"json": "log_findings"})
    # where something was rounded
    rounding: Rounding | None = field(default=None, metadata=OPTIONAL)
    # where the log has one and a model is at hand
    trainer_column: TrainerColumn | None = field(default=None, metadata=OPTIONAL)
    # the log's own two columns, where it has both and a model is at hand
    columns: "TwoColumns | None" = field(default=None, metadata=OPTIONAL)
    # of a mixture of experts, where the log names the experts
    experts: "ExpertsDifference | None" = field(default=None, metadata=OPTIONAL)
    # where both columns are the log's
    by_version: list[VersionFigures] | None = field(default=None, metadata=OPTIONAL)
    # rollouts that do not say how they were drawn, of such a log
    distribution_unsaid: int | None = field(default=None, metadata=OPTIONAL)

    @property
    def rounds(self) -> bool:
        """Whether all differences are rounding, and no hypothesis explains them better."""
        columns = [self.hypotheses, *([self.trainer_column] if self.trainer_column else [])]
        return all(x.is_rounding or not x.distance for x in columns) and not any(x.best for x in columns)


def is_doubled(faults: list[LogFault]) -> bool:
    """Whether a log holds lines twice."""
    return any(fault.name == doubled_lines.FAULT.name for fault in faults)
