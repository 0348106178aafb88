"""One problem of a task."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem."""

    id: int  # its index in its split
    prompt: str
    answer: str  # a correct completion, or what the reward compares a completion with
    system: str = ""  # the system prompt before it; only with a chat template
