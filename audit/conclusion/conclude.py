"""What an audit concludes from its figures, each derived once: the outcome, the likely cause, the notes."""

from ..report import Measurements, Report
from .causes import cause
from .faults import faults
from .notes import notes
from .outcome import Kind, Tolerances, outcome_of


def concluded(measured: Measurements, tolerances: Tolerances) -> Report:
    """The report: the measurements with outcome, cause and notes."""
    named_faults = faults(measured)
    outcome = outcome_of(measured, tolerances, [fault.kind for fault in named_faults])
    return Report(
        **{name: getattr(measured, name) for name in Measurements.__dataclass_fields__},
        outcome=outcome,
        cause=named_faults[0] if outcome.kind is Kind.FAULT else cause(measured),
        notes=notes(measured),
    )
