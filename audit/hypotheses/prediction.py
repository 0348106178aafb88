"""One thing that may have happened, and the log-probabilities that the log would then hold."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .evidence import Evidence, Scores


@dataclass(frozen=True)
class Prediction:
    """What a log would hold if `what` were so. Lines and tokens that it says nothing about are left out."""

    what: str
    scores: Scores
    searched: bool = False  # whether only the lines farthest apart were tried


Predictor = Callable[[Evidence], Iterator[Prediction]]
