"""Rewards by name: three ways to compare a completion with the answer of its problem.

    exact     the completion is the answer, but for spaces and line ends around both
    numeric   the last number of the completion is the answer's
    math      math-verify finds the completion's last answer equal to the problem's

Each is 1.0 where the two agree, and 0.0 elsewhere. Its mean is an accuracy.
"""

import logging
import re
from fractions import Fraction

from ...files.reading import shown
from .problem import Problem

# Characters at the end of a completion in which its answer is searched, and the most of a problem's answer.
READ_CHARS = 4096
# The largest exponent, and the largest number under a factorial, in an answer. sympy would take hours to
# write out 9^(9^9).
_LARGEST_POWER = 1000
# 1,200 and -0.5 and 3/4. A sign after a digit or a bracket is a minus between two numbers.
_NUMBER = re.compile(
    r"(?<![0-9.)])-?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?"
)
# What may stand around a number that is an answer: money, percent, the dollars of LaTeX.
_AROUND_NUMBER = " \t\r\n$€£\\%"


class Exact:
    """The completion is the answer."""

    binary = True

    def __call__(self, problem: Problem, completion: str) -> float:
        """1.0 or 0.0."""
        return float(completion.strip() == problem.answer.strip())

    def check(self, problem: Problem) -> None:
        """Every answer can be compared."""


class Numeric:
    """The last number of the completion has the answer's value: 1,000 is 1000.0, and 3/4 is 0.75."""

    binary = True

    def __call__(self, problem: Problem, completion: str) -> float:
        """1.0 or 0.0. Raises ValueError for an answer that is no number."""
        numbers = _NUMBER.findall(_ascii_minus(completion[-READ_CHARS:]))
        return float(bool(numbers) and _value(numbers[-1]) == self._answer(problem))

    def check(self, problem: Problem) -> None:
        """Raise ValueError for an answer that is no number."""
        self._answer(problem)

    def _answer(self, problem: Problem) -> Fraction:
        text = _ascii_minus(problem.answer).strip(_AROUND_NUMBER)
        value = _value(text) if _NUMBER.fullmatch(text) else None
        if value is None:
            raise ValueError(
                f"the answer {shown(problem.answer)} of problem {problem.id} is no number; name the text "
                "before the number in task.options.answer_after, or take another task.reward"
            )
        return value


class MathVerify:
    """math-verify finds the completion's last answer equal to the problem's."""

    binary = True

    def __init__(self):
        # math-verify warns that it has no time limit (see _gold).
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, problem: Problem, completion: str) -> float:
        """1.0 or 0.0. Raises ValueError for an answer that math-verify cannot read."""
        from math_verify import parse, verify

        gold = self._gold(problem)
        answers = [x for x in parse(completion[-READ_CHARS:], parsing_timeout=None) if _can_be_computed(x)]
        return float(verify(gold, answers, timeout_seconds=None))

    def check(self, problem: Problem) -> None:
        """Raise ValueError for an answer that math-verify cannot read."""
        self._gold(problem)

    def _gold(self, problem: Problem) -> list[object]:
        """The problem's answer, read.

        There are no time limits: on a busy machine they would decide a reward. Bounds on length and size keep
        the comparison short instead.
        """
        from math_verify import parse

        gold, answer = parse(f"${problem.answer}$", parsing_timeout=None), shown(problem.answer)
        if not gold:
            raise ValueError(f"math-verify cannot read the answer {answer} of problem {problem.id}")
        if not all(map(_can_be_computed, gold)):
            raise ValueError(f"the answer {answer} of problem {problem.id} would take too long to compute")
        return gold


def _ascii_minus(text: str) -> str:
    return text.replace("\u2212", "-")


def _value(number: str) -> Fraction | None:
    """The value of a match of _NUMBER; None for a division by zero."""
    above, _, below = number.replace(",", "").partition("/")
    denominator = int(below or "1")
    return Fraction(above) / denominator if denominator else None


def _can_be_computed(x: object) -> bool:
    """Whether a comparison with x takes a bounded time.

    It does for a string, and for an expression without towers of powers, large factorials, sums, products and
    integrals.
    """
    from sympy import Basic, Integral, Pow, Product, Sum, factorial, preorder_traversal

    if not isinstance(x, Basic):
        return True
    for node in preorder_traversal(x):
        if isinstance(node, Sum | Product | Integral):
            return False
        grows = node.exp if isinstance(node, Pow) else node.args[0] if isinstance(node, factorial) else None
        if (
            grows is not None
            and not grows.free_symbols
            and not (grows.is_Rational and abs(grows) <= _LARGEST_POWER)
        ):
            return False
    return True


NAMED_REWARDS: dict[str, Exact | Numeric | MathVerify] = {
    "exact": Exact(),
    "numeric": Numeric(),
    "math": MathVerify(),
}
