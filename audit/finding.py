"""What an audit found, in words."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A likely cause, or a fault: its kind, what it is, and what to do about it."""

    kind: str
    text: str
    remedy: str
