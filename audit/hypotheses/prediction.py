"""One thing that may have happened, and the log-probabilities that the log would then hold."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .evidence import Evidence
from .noise import Noise
from .scorable_lines import Scores

if TYPE_CHECKING:
    import numpy as np

    from ...model.decoder import Decoder


@dataclass(frozen=True)
class Prediction:
    """What a log would hold if `what` were so. Lines and tokens that it says nothing about are left out.

    Of the two sides, `what` calls the one at fault the sampler.
    """

    what: str
    scores: Scores
    # Of so many candidates this is the one nearest to the log; and whether each line has a choice of its own.
    choices: int = 1
    by_line: bool = False
    searched: bool = False  # whether only the lines farthest apart were tried
    # What a second cause is tried on: other sampling parameters than the log's, and another model.
    params: Mapping[str, Any] = field(default_factory=dict)
    decoder: "Decoder | None" = None
    # Of a change of the numbers themselves: the numbers before it.
    undone: "Callable[[np.ndarray], np.ndarray] | None" = None
    # How far two engines with this fault are apart, where that is more than rounding.
    noise: Noise | None = None


Predictor = Callable[[Evidence], Iterator[Prediction]]
