"""What hypotheses are tried on: the lines of a log with two columns. It needs no model.

Shapes: C completion tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.sampling_params import SamplingParams

if TYPE_CHECKING:
    from .scorer import Scorer

Scores = dict[int, np.ndarray]  # of a line, by its index in Evidence.lines: [C] fp32, NaN where unknown


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
    slack: np.ndarray | None = None  # [C] nats by which the edge of a cut may move a number

    @property
    def pair(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(prompt_ids, completion_ids)."""
        return self.prompt_ids, self.completion_ids


@dataclass(frozen=True)
class Evidence:
    """The lines on which hypotheses are tried. scorer: None where the log has both columns and no model.

    side: whose numbers `logged` are, "sampler" or "trainer". by_dtype: our decoder's scores of all lines in
    each dtype, where a model is at hand. longest_prompt: of the whole log, in tokens. log: all lines that
    `lines` were chosen from, where these are fewer.
    """

    lines: list[Line]
    scorer: "Scorer | None" = None
    side: str = "sampler"
    by_dtype: dict[str, Scores] = field(default_factory=dict)
    longest_prompt: int = 0
    log: list[Line] = field(default_factory=list)

    @property
    def all_lines(self) -> list[Line]:
        """The lines that are tried, and those that are not."""
        return self.log or self.lines

    @cached_property
    def _by_index(self) -> dict[int, Line]:
        return {x.index: x for x in self.all_lines}

    def beside(self, line: Line, by: int) -> Line | None:
        """The line `by` lines after another one in the log; None where it is not known."""
        known, at = self._by_index, line.index + by
        # Where all lines are known, the last one stands before the first one.
        return known.get(at % len(known) if len(known) == max(known) + 1 else at)

    def params(self) -> list[SamplingParams]:
        """The sampling parameters of each line."""
        return [line.params or SamplingParams() for line in self.lines]

    def pairs(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The pair of each line."""
        return [line.pair for line in self.lines]

    def by_line(self, scores: Iterable[np.ndarray]) -> Scores:
        """Scores of all lines, in their order."""
        return dict(enumerate(scores))
