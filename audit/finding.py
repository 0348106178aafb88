"""What an audit found, in words."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A likely cause, or a fault: its kind, what it is, and what to do about it."""

    kind: str
    text: str
    remedy: str
    trainer_column: bool = False  # whether it is of a log's own trainer column
    suspicion: bool = False  # whether it rests on a log's two columns alone, without a model


class NothingToCompareError(ValueError):
    """A log of which no token has two log-probabilities, since one column holds none: a fault of the log."""
