"""The outcome of an audit: the one answer to "is it equal?".

Exit code, page, terminal, summary and JSON all read it from here. It is derived once, from the figures of the
report, from the faults that the report names, and from the tolerances that were asked for:

    kind               what it says                                                         passes
    equal              every log-probability compared has the same bits on both sides       yes
    rounded            no difference is larger than the rounding that the log declares      yes
    equal columns      "equal" of a log's own two columns, which is no proof: both may      yes
                       come from one source
    rounded columns    "rounded" of a log's own two columns, no proof either                yes
    sound              not equal; of a log, the whole difference is what rounding makes    yes
                       (hypotheses/noise.py), and no tolerance was given
    within             not equal, and the tolerances that were given hold                   yes
    rounding           two engines that are not equal, though each does what the            no
                       checkpoint says: only sums and roundings are in another order, or
                       in another dtype; no tolerance was given
    fault              the above, and the audit names a fault beside it                     no
    beyond             a tolerance that was given does not hold                             no
    differs            not equal, and no tolerance was given                                no

A tolerance excuses a difference and what causes it. It does not excuse a fault that is there whatever the
size of the difference: a sampler whose bits depend on its batch, tokens that were not drawn from the
sampler's column, a column with what is no log-probability, advantages that do not follow the rewards, a log
with doubled lines, a trainer column with an error of its own.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..figures.bands import Corrections
    from ..figures.measure import Figures


class Kind(str, Enum):
    """The kinds of outcome, the best first; see the table above."""

    EQUAL = "equal"
    ROUNDED = "rounded"
    EQUAL_COLUMNS = "equal columns"
    ROUNDED_COLUMNS = "rounded columns"
    SOUND = "sound"
    WITHIN = "within"
    ROUNDING = "rounding"
    FAULT = "fault"
    BEYOND = "beyond"
    DIFFERS = "differs"

    def __str__(self) -> str:
        """The value: Python 3.10 has no StrEnum."""
        return self.value


# The words, the sign before them, and the class of the page's headline, which has its colour.
_SHOWN = {
    Kind.EQUAL: ("Equal to the bit", "=", "equal"),
    Kind.ROUNDED: ("Equal within the log's rounding", "≈", "equal"),
    Kind.EQUAL_COLUMNS: ("Equal columns, no proof", "=", "unproven"),
    Kind.ROUNDED_COLUMNS: ("Columns equal within the log's rounding, no proof", "≈", "unproven"),
    Kind.SOUND: ("Sound: rounding", "≈", "rounding"),
    Kind.WITHIN: ("Within the tolerance", "≈", "equal"),
    Kind.ROUNDING: ("Not equal: rounding", "≈", "rounding"),
    Kind.FAULT: ("Fault", "≠", "unequal"),
    Kind.BEYOND: ("Beyond the tolerance", "≠", "unequal"),
    Kind.DIFFERS: ("Not equal", "≠", "unequal"),
}


@dataclass(frozen=True)
class Tolerances:
    """What an audit may differ by. None demands nothing."""

    max_k3: float | None = None  # nats a token
    max_abs: float | None = None  # nats, of every log-probability
    band: str | None = None  # a name in bands.BANDS or in gates.py

    def check(self) -> None:
        """Raise ValueError for a tolerance below 0."""
        for name in ("max_k3", "max_abs"):
            value = getattr(self, name)
            if value is not None and not value >= 0.0:
                raise ValueError(f"audit: {name} ({value}) must be 0 or more")

    @property
    def given(self) -> bool:
        """Whether any was asked for."""
        return any(value is not None for value in asdict(self).values())

    def hold(self, figures: "Figures", corrections: "Corrections") -> bool:
        """Whether the figures of a report lie within all of them.

        With tokens outside the trainer's set, or of an infinite ratio, none holds: the KL is infinite,
        whatever its estimate over the other tokens.
        """
        if figures.outside.tokens or figures.infinite.tokens:
            return False
        return (
            (self.max_k3 is None or abs(figures.k3.value) <= self.max_k3)
            and (self.max_abs is None or figures.max_abs <= self.max_abs)
            and (self.band is None or corrections.in_band(self.band))
        )


NO_TOLERANCES = Tolerances()


@dataclass(frozen=True)
class Outcome:
    """What an audit says, and the names of the faults beside a difference that it found."""

    kind: Kind
    faults: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the exit code is 0."""
        return self.kind not in (Kind.ROUNDING, Kind.FAULT, Kind.BEYOND, Kind.DIFFERS)

    @property
    def words(self) -> str:
        """The outcome in words, as every place shows it."""
        words = _SHOWN[self.kind][0]
        named = self.faults and self.kind in (Kind.FAULT, Kind.DIFFERS)
        return f"{words}: {'; '.join(self.faults)}" if named else words

    @property
    def sign(self) -> str:
        """The sign before the words on the page."""
        return _SHOWN[self.kind][1]

    @property
    def css_class(self) -> str:
        """The class of the page's headline: equal, unproven, rounding or unequal."""
        return _SHOWN[self.kind][2]

    def as_json(self) -> dict[str, Any]:
        """For audit.json."""
        return {
            "kind": str(self.kind),
            "passed": self.passed,
            "words": self.words,
            "faults": list(self.faults),
        }


def outcome_of_run(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome over the checkpoints of a run: that of the worst one, with the faults of all."""
    kinds = list(Kind)
    worst = max((outcome.kind for outcome in outcomes), key=kinds.index)
    return Outcome(worst, tuple(dict.fromkeys(name for outcome in outcomes for name in outcome.faults)))
