"""Where two records differ: the one search and the one set of words of every command that compares two.

A record is a mapping whose names stand in causal order, so the first difference is the one nearest to the
cause. Values are equal or different, or one side lacks what the other has.
"""

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from ..files.reading import printable, shown

T = TypeVar("T")
# Characters of a text that a difference shows.
_EXCERPT = 20


class _Absent:
    """What stands for a value on the side that lacks it."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


@dataclass(frozen=True)
class Difference:
    """How two records differ in one quantity."""

    quantity: str
    values: tuple[Any, Any] | None = None  # of both sides; None for hashes, which say nothing to a reader
    part: str = ""  # the weight, the setting or the position, where one can be named
    others: int = 0  # further weights that differ in the same quantity
    step: int | None = None
    place: str = ""  # where in the run or in the step, in words
    note: str = ""  # what else is known of it, in words

    @property
    def missing(self) -> int | None:
        """The side that lacks the quantity, 0 or 1; None where both have it."""
        return next((i for i, x in enumerate(self.values or ()) if x is ABSENT), None)

    @property
    def one_sided(self) -> str:
        """Which side alone has the quantity, in words; empty where both have it."""
        return "" if self.missing is None else f"only the {('second', 'first')[self.missing]} has it"

    def __str__(self) -> str:
        place = self.place or (f"step {self.step}" if self.step is not None else "")
        text = f"{place}: " if place else ""
        if self.values is None:
            text += self.quantity.replace("_", " ") + (f" of {self.part}" if self.part else "")
            text += f" and {self.others} other weights" if self.others else ""
        else:
            part = f" {self.part}:" if self.part else ""
            text += f"{self.quantity}{part} {' and '.join(map(shown, self.values))}"
        return printable(text + self.note, keep="")

    def beside(self, source: str) -> str:
        """The first side's value, beside what it must be: "reward is 0.0, and the tokens give 1.0"."""
        x, y = map(shown, self.values)
        return printable(f"{self.quantity} is {x}, and {source} {y}", keep="")


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


def differences(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    same: Callable[[Any, Any], bool] = operator.eq,
    absent: Any = ABSENT,
) -> Iterator[Difference]:
    """A difference for each name whose values are not the same, in a's order and then in b's.

    absent: what a side has that lacks a name.
    """
    for name in dict.fromkeys((*a, *b)):
        x, y = a.get(name, absent), b.get(name, absent)
        if x is ABSENT or y is ABSENT or not same(x, y):
            yield Difference(name, (x, y))


def first_difference(
    a: Mapping[str, Any], b: Mapping[str, Any], same: Callable[[Any, Any], bool] = operator.eq
) -> Difference | None:
    """The first of the differences; None where all values are the same."""
    return next(differences(a, b, same), None)


def first_wrong(
    stored: Mapping[str, Any], derived: Mapping[str, Any], same: Callable[[Any, Any], bool] = operator.eq
) -> Difference | None:
    """The first stored value that is not the derived one. What was not derived does not count."""
    return first_difference({name: stored[name] for name in derived if name in stored}, derived, same)


def first_in_order(
    kinds: Iterable[str], pairs: Sequence[tuple[T, T]], compare: Callable[[str, T, T], Difference | None]
) -> tuple[str, tuple[T, T], Difference] | None:
    """The first difference of records in pairs: its kind, its pair, and itself; None where all are equal.

    kinds: of quantities, in causal order. A kind counts before a later one, in whichever pair it stands.
    compare: how a pair differs in a kind.
    """
    each = ((kind, pair, compare(kind, *pair)) for kind in kinds for pair in pairs)
    return next((first for first in each if first[2]), None)


def same_json(x: Any, y: Any) -> bool:
    """Whether two values are one text in JSON: 1 is not 1.0, NaN is NaN, and an object has no order."""
    return json.dumps(x, sort_keys=True) == json.dumps(y, sort_keys=True)


def first_unequal(x: Sequence[Any], y: Sequence[Any]) -> int | None:
    """The first index at which two sequences differ; the length of the shorter where it is their only one."""
    if x == y:
        return None
    return next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))


def compare_values(quantity: str, x: Any, y: Any) -> Difference | None:
    """How two values differ: two texts and two lists at their first place; None where they are equal."""
    if x == y:
        return None
    if type(x) is not type(y) or not isinstance(x, list | tuple | str):
        return Difference(quantity, (x, y))
    i = first_unequal(x, y)
    if isinstance(x, str):
        return Difference(quantity, (x[i : i + _EXCERPT], y[i : i + _EXCERPT]), f"at character {i}")
    if i == min(len(x), len(y)):
        return Difference(f"{quantity}s:", (len(x), len(y)), note=", equal as far as both go")
    return Difference(quantity, (x[i], y[i]), f"at position {i}")
