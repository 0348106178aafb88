"""What an audit concludes from its figures, each derived once: the outcome, the likely cause, the notes."""

from collections.abc import Mapping
from typing import Any

from .causes import cause
from .faults import faults
from .notes import notes
from .outcome import Tolerances, outcome_of


def concluded(report: Mapping[str, Any], tolerances: Tolerances) -> dict[str, Any]:
    """The report with its outcome, cause and notes."""
    found_faults = faults(report)
    outcome = outcome_of(report, tolerances, [fault["kind"] for fault in found_faults])
    return {
        **report,
        "outcome": outcome,
        "cause": cause(report, outcome, found_faults),
        "notes": notes(report),
    }
