"""One line of a check: what was looked at, what came out, and the word in front of it."""

from dataclasses import dataclass
from enum import Enum

from .difference import Difference


class Mark(str, Enum):
    """The word in front of a line."""

    EQUAL = "ok"
    DIFFERENT = "FAIL"
    OPEN = "open"  # neither confirmed nor refuted
    NOT_COMPARED = "note"  # it says something and checks nothing


@dataclass(frozen=True)
class CheckResult:
    """One line of `zerokl verify run` and of `zerokl attest verify`."""

    what: str
    result: str
    mark: Mark
    difference: Difference | None = None  # of a step that was done again

    @classmethod
    def judged(cls, what: str, fault: object, words: str = "") -> "CheckResult":
        """The fault where there is one, else the words. A fault is a text or a Difference."""
        difference = fault if isinstance(fault, Difference) else None
        mark = Mark.DIFFERENT if fault else Mark.EQUAL
        return cls(what, str(fault) if fault else words, mark, difference)

    @classmethod
    def note(cls, what: str, words: str) -> "CheckResult":
        """A line that checks nothing."""
        return cls(what, words, Mark.NOT_COMPARED)

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return self.mark is not Mark.DIFFERENT
