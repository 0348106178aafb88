"""The bars that projects set for a new model family: a figure of every step, its bound, and how many steps.

A band (bands.py) is what a project's tests gate on; a bar is what it asks for before it takes a family.
"""

from dataclasses import dataclass, replace

from ..frameworks import FRAMEWORKS
from .gates import Gate


@dataclass(frozen=True)
class Bar:
    """What must hold at every step."""

    gate: Gate  # its bound and source are the bar's
    steps: int  # at least so many
    asks: str = ""  # what else the project asks for, which no log tells


BARS = {
    "prime-rl": Bar(
        replace(
            FRAMEWORKS["prime-rl"].gate,
            bound=0.015,
            may_reach=False,
            source="prime-rl's docs/development.md, of August 2026",
        ),
        steps=20,
        asks="the math environment, and a batch_size of 64",
    ),
    "nemo-rl": Bar(
        replace(FRAMEWORKS["nemo-rl"].gate, source="NeMo-RL's docs/adding-new-models.md, of 2026"),
        steps=1,
        asks="equal precision on both sides",
    ),
}
