"""What the search for a hypothesis found."""

from dataclasses import dataclass, field

from .difference_places import Where
from .judgement import EXACT, FP32


@dataclass(frozen=True)
class Row:
    """A hypothesis in its best form. Distances are in nats a token."""

    name: str
    what: str
    remedy: str
    distance: float  # before
    left: float  # after
    explained: float
    share_left: float
    tokens: int
    lines: int  # lines that it comes nearer to than the trainer's own scores
    lines_tried: int
    slope: float  # of the difference on the predicted one
    errors: float  # by which the slope is away from 0
    fits: bool
    searched: bool = False  # whether only the lines farthest apart were tried
    candidates: int = 1  # of which this is the one nearest to the log
    # The share that the best candidate leaves of shuffled numbers; 1 where there is no choice.
    left_by_chance: float = 1.0

    @property
    def is_exact(self) -> bool:
        """Whether it explains the whole difference, but for what an exact fit may leave."""
        return self.share_left <= EXACT


@dataclass(frozen=True)
class Entry:
    """Where a difference enters the model (knobs/free_changes.py): the operation, and the next one.

    Shares are of the squares of the difference, in lines left out.
    """

    words: str
    share: float
    next_words: str
    next_share: float
    by_chance: float  # of shuffled numbers, by the best change
    is_told: bool

    def text(self) -> str:
        """The place and what it explains, as two sentences without the first capital."""
        lead = "the difference enters at" if self.is_told else "the place that explains most is"
        return (
            f"{lead} {self.words}. It explains {self.share:.0%} of the squares of the difference by a free "
            f"change, in lines that this was not fitted to; the next operation, {self.next_words}, "
            f"{max(self.next_share, 0.0):.0%}; and the best one {max(self.by_chance, 0.0):.0%} of shuffled "
            "numbers."
        )


@dataclass(frozen=True)
class Tried:
    """What every hypothesis says to a log, and which one fits.

    Distances are means of |logged - predicted| over the tokens, in nats.
    """

    distance: float
    tokens: int
    rounding: float = FP32  # what rounding makes of a token, of the dtypes that were tried
    rounds_like: str = ""  # the dtype whose rounding the whole difference is; empty where it is not
    where: Where | None = None  # where the difference sits; None where it is everywhere
    # the dtype that the log's two columns share, in words, where the audit's is another
    common_dtype: str = field(default="", metadata={"json": "of_both"})
    tried: int = 0
    need_a_model: int = 0
    best: Row | None = field(default=None, metadata={"json": "found"})  # the one that fits best
    also: list[str] = field(default_factory=list)  # others that fit as well, in words
    rows: list[Row] = field(default_factory=list)  # the nearest first
    entry: Entry | None = None  # where nothing fits, and this was looked for
    untried: str = ""  # that no number was fitted at an operation, or no place looked for, and why

    @property
    def is_exact(self) -> bool:
        """Whether what fits best is exact."""
        return self.best is not None and self.best.is_exact

    @property
    def is_rounding(self) -> bool:
        """Whether the difference may be rounding alone."""
        return bool(self.rounds_like)

    @property
    def is_within_rounding(self) -> bool:
        """Whether there is no difference, or one that may be rounding alone."""
        return not self.distance or self.is_rounding
