"""Lines of a log with two columns, which a model may score.

Shapes: C completion tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...kernels.sampling_params import SamplingParams

Scores = dict[int, np.ndarray]  # of a line, by its index in Lines.lines: [C] fp32, NaN where unknown


@dataclass(frozen=True)
class Line:
    """One completion of the log."""

    index: int  # of the rollout in the report
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logged: np.ndarray  # [C] fp32, the sampler's; NaN where there is none
    scored: np.ndarray  # [C] fp32, the trainer's; NaN where there is none
    params: SamplingParams | None = None
    masked: bool = False  # whether the log says that some tokens were not drawn
    # As the log says them: the weights that drew all of it, the step, the turn of a conversation.
    version: int | None = None
    step: int | None = None
    turn: int | None = None
    decimals: int | None = None  # that the log says `logged` keeps; None where it says nothing
    # [C] nats by which the edge of a cut and the decimals that the log declares may move a number
    slack: np.ndarray | None = None

    @property
    def pair(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(prompt_ids, completion_ids)."""
        return self.prompt_ids, self.completion_ids


@dataclass(frozen=True)
class Lines:
    """Some lines."""

    lines: list[Line]

    def params(self) -> list[SamplingParams]:
        """The sampling parameters of each line."""
        return [line.params or SamplingParams() for line in self.lines]

    def pairs(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The pair of each line."""
        return [line.pair for line in self.lines]

    def by_line(self, scores: Iterable[np.ndarray]) -> Scores:
        """Scores of all lines, in their order."""
        return dict(enumerate(scores))
