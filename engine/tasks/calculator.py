"""Calculator: "12*34+56=" with a tool that does one operation a turn. Turns: "12*34", "408+56", "=464".

The model writes an operation, and the tool answers with its value. A turn that begins with "=" is the answer.
"""

import re

from .base import Problem, SplitTask, random_integers, split_problems
from .environment import EnvironmentKey, Observation

_OPERATION = re.compile(r"(-?\d{1,9})([+*-])(\d{1,9})")


class CalculatorEnvironment:
    """The tool of one trajectory."""

    def reset(self, problem: Problem, key: EnvironmentKey) -> str:
        self._answer = problem.answer
        return problem.prompt

    def step(self, ids: list[int], text: str) -> Observation:
        """1.0 for the exact answer, else 0.0. To what is no operation the tool says "?"."""
        if text.startswith("="):
            return Observation(reward=float(text[1:] == self._answer), done=True)
        return Observation(f"{calculate(text)}>")


class Calculator(SplitTask):
    """Expressions a*b+c and a*b-c of numbers 0 .. max_value, in a random order."""

    def __init__(self, max_value: int = 99, train: int = 512, held_out: int = 256, seed: int = 0):
        n, side = train + held_out, max_value + 1
        if not 1 <= max_value <= 999 or n > 2 * side**3:
            raise ValueError(
                f"task calculator: max_value ({max_value}) must lie in 1 to 999, and allow train + held_out "
                f"({n}) expressions"
            )
        pairs: dict[str, str] = {}
        for word in range(64):  # those that were drawn twice are drawn again
            numbers = random_integers(3 * n, 0, max_value, seed, word=2 * word).reshape(n, 3).tolist()
            signs = random_integers(n, 0, 1, seed, word=2 * word + 1).tolist()
            for (a, b, c), sign in zip(numbers, signs, strict=True):
                operation = f"{a}*{b}{'+-'[sign]}{c}"
                pairs.setdefault(f"{operation}=", str(a * b + (c if sign == 0 else -c)))
            if len(pairs) >= n:
                break
        self._splits = split_problems(list(pairs.items()), train, held_out, "calculator")

    def environment(self) -> CalculatorEnvironment:
        return CalculatorEnvironment()

    def demonstration(self, problem: Problem) -> list[str]:
        """The turns that solve a problem."""
        product, sign, rest = re.split(r"([+-])", problem.prompt.rstrip("="))
        return [product, f"{calculate(product)}{sign}{rest}", f"={problem.answer}"]


def calculate(text: str) -> str:
    """The value of one operation on two whole numbers, such as 12*34; "?" for any other text."""
    match = _OPERATION.fullmatch(text)
    if match is None:
        return "?"
    a, operation, b = int(match[1]), match[2], int(match[3])
    return str(a + b if operation == "+" else a - b if operation == "-" else a * b)
