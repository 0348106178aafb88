"""What an audit concludes from its figures, each derived once: the outcome, the likely cause, the notes."""

from dataclasses import replace

from ..report import Measurements, Report
from .causes import EQUAL_COLUMNS, cause
from .faults import faults
from .notes import notes
from .outcome import Kind, Tolerances, outcome_of

# Causes under which both engines do what the checkpoint says.
_ROUNDINGS = ("rounding", "dtype")


def _known_without_a_model(measured: Measurements) -> tuple[str, ...]:
    """Kinds of a cause that no model would change: what the ids show, and that no fault is named."""
    return (EQUAL_COLUMNS, "rounded log", "rounding", "unknown", *(x.name for x in measured.log.log_faults))


def concluded(measured: Measurements, tolerances: Tolerances) -> Report:
    """The report: the measurements with outcome, cause and notes."""
    named_faults = faults(measured)
    outcome = outcome_of(measured, tolerances, [fault.kind for fault in named_faults])
    likely = cause(measured)
    if named_faults and (outcome.kind is Kind.FAULT or likely.kind in ("unknown", "rounding")):
        likely = named_faults[0]
    if outcome.kind is Kind.DIFFERS and not named_faults and likely.kind in _ROUNDINGS:
        outcome = replace(outcome, kind=Kind.ROUNDING)
    if measured.columns_alone and likely.kind not in _known_without_a_model(measured):
        remedy = f"Confirm it with --model before you mend it. {likely.remedy}"
        likely = replace(likely, suspicion=True, remedy=remedy)
    return Report(
        **{name: getattr(measured, name) for name in Measurements.__dataclass_fields__},
        outcome=outcome,
        cause=likely,
        notes=notes(measured),
    )
