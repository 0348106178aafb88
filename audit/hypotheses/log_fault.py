"""A fault that the ids of a log show."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LogFault:
    """A fault of a log: its name, what it is, and what to do about it."""

    name: str
    text: str
    remedy: str
