"""What hypotheses are tried on: the lines of a log with two columns. It needs no model."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from .scorable_lines import Line, Lines, Scores

if TYPE_CHECKING:
    from .other_scores import Scorer


@dataclass(frozen=True)
class Evidence(Lines):
    """The lines on which hypotheses are tried. scorer: None where the log has both columns and no model.

    side: whose numbers `logged` are, "sampler" or "trainer". by_dtype: our decoder's scores of all lines in
    each dtype, where a model is at hand. longest_prompt: of the whole log, in tokens. log: all lines that
    `lines` were chosen from, where these are fewer.
    """

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
        known, index = self._by_index, line.index + by
        # Where all lines are known, the last one stands before the first one.
        return known.get(index % len(known) if len(known) == max(known) + 1 else index)
