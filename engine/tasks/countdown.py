"""Countdown: "3,7,2:13=" -> "3*2+7", an expression with each number once and the target as its value."""

import ast
import re
from fractions import Fraction

from .base import Problem, SplitTask, random_integers, split_problems

_OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}
# Characters of an expression.
_LONGEST = 100


class Countdown(SplitTask):
    """`numbers` random numbers 1 .. max_number, and a target 0 .. max_target that they can reach."""

    def __init__(
        self,
        numbers: int = 3,
        max_number: int = 9,
        max_target: int = 99,
        train: int = 512,
        held_out: int = 256,
        seed: int = 0,
    ):
        if numbers * (len(str(max_number)) + 1) > _LONGEST:
            raise ValueError(
                f"task countdown: {numbers} numbers up to {max_number} may need more than the {_LONGEST} "
                "characters of an expression; lower numbers or max_number"
            )
        if numbers < 2 or max_number < 1 or max_target < 0:
            raise ValueError(
                f"task countdown: numbers ({numbers}) must be at least 2, "
                f"max_number ({max_number}) at least 1 and max_target ({max_target}) not negative"
            )
        n = 4 * (train + held_out)  # more than needed: duplicates and targets out of range are dropped
        drawn = random_integers(n * numbers, 1, max_number, seed, word=0).reshape(n, numbers).tolist()
        operations = random_integers(n * (numbers - 1), 0, 2, seed, word=1).reshape(n, numbers - 1).tolist()
        pairs = {}
        for values, ops in zip(drawn, operations, strict=True):
            text = str(values[0]) + "".join("+-*"[op] + str(v) for op, v in zip(ops, values[1:], strict=True))
            target = evaluate(text)[0]
            if 0 <= target <= max_target:
                pairs.setdefault(f"{','.join(map(str, sorted(values)))}:{target}=", text)
        self._splits = split_problems(list(pairs.items()), train, held_out, "countdown")

    def reward(self, problem: Problem, completion: str) -> float:
        """1.0 for an expression over + - * / and parentheses with the right numbers and value, else 0.0."""
        numbers, target = problem.prompt.rstrip("=").split(":")
        try:
            value, used = evaluate(completion)
        except (ValueError, ZeroDivisionError):
            return 0.0
        return float(value == int(target) and sorted(used) == sorted(map(int, numbers.split(","))))


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """The value of an arithmetic expression, and the numbers in it.

    Raises ValueError for any other text, and ZeroDivisionError.
    """
    if len(text) > _LONGEST or not re.fullmatch(r"[0-9+\-*/() ]*", text):
        raise ValueError("not an arithmetic expression")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("not an expression") from None
    used: list[int] = []

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{type(node).__name__} is not arithmetic")

    return value(tree.body), used
