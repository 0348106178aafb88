"""What an audit concludes from its figures, each derived once: the outcome, the likely cause, the notes."""

from collections.abc import Sequence
from dataclasses import replace

from ..report import Measurements, Report
from .causes import EQUAL_COLUMNS, cause
from .faults import faults
from .notes import notes
from .outcome import Kind, Outcome, Tolerances

# Causes under which both engines do what the checkpoint says.
_ROUNDINGS = ("rounding", "dtype")
# Causes that name nothing that is wrong, or only where: a fault beside them is told first.
_WEAK = ("unknown", "rounding", "place")


def _known_without_a_model(measured: Measurements) -> tuple[str, ...]:
    """Kinds of a cause that no model would change: what the ids show, and that no fault is named."""
    return (EQUAL_COLUMNS, "rounded log", "rounding", "unknown", *(x.name for x in measured.log.log_faults))


def concluded(measured: Measurements, tolerances: Tolerances) -> Report:
    """The report: the measurements with outcome, cause and notes."""
    named_faults = faults(measured)
    outcome = outcome_of(measured, tolerances, [fault.kind for fault in named_faults])
    likely = cause(measured)
    if named_faults and (outcome.kind is Kind.FAULT or likely.kind in _WEAK):
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


def outcome_of(measured: Measurements, tolerances: Tolerances, faults: Sequence[str]) -> Outcome:
    """The outcome of one audit. faults: the names of the faults that it found."""
    kind = _agreement(measured)
    if tolerances.given and kind is not Kind.EQUAL and kind is not Kind.EQUAL_COLUMNS:
        if not tolerances.hold(measured.figures, measured.corrections):
            return Outcome(Kind.BEYOND, tuple(faults))
        kind = Kind.WITHIN if kind in (Kind.DIFFERS, Kind.SOUND) else kind
    return Outcome(Kind.FAULT if faults and kind is not Kind.DIFFERS else kind, tuple(faults))


def _agreement(measured: Measurements) -> Kind:
    """How the two sides agree, without tolerances and faults."""
    vocab = measured.full_vocab
    if measured.figures.equal and (vocab is None or vocab.frac_values_equal == 1.0):
        return Kind.EQUAL_COLUMNS if measured.columns_alone else Kind.EQUAL
    rounding = measured.log and measured.log.rounding
    if rounding and rounding.tokens_beyond == 0:
        return Kind.ROUNDED_COLUMNS if measured.columns_alone else Kind.ROUNDED
    if measured.log and measured.log.rounds:
        return Kind.SOUND
    return Kind.DIFFERS
