"""Running sums modulo 10: "6604=" -> "6226". Each digit depends on all before it."""

from itertools import accumulate

from .base import Problem, SplitTask, random_integers, split_problems


class Sums(SplitTask):
    """Distinct strings of random digits. The answer has, at each place, the last digit of the sum so far."""

    binary = False

    def __init__(self, digits: int = 12, train: int = 512, held_out: int = 256, seed: int = 0):
        if not 1 <= digits <= 500:
            raise ValueError(f"task sums: digits ({digits}) must be at least 1 and at most 500")
        n = 2 * (train + held_out)  # more than needed: duplicates are dropped
        rows = random_integers(n * digits, 0, 9, seed, word=0).reshape(n, digits).tolist()
        distinct = dict.fromkeys(map(tuple, rows))
        self._splits = split_problems([_pair(row) for row in distinct], train, held_out, "sums")

    def reward(self, problem: Problem, completion: str) -> float:
        """The share of places with the right digit. 1.0 is the right string, with nothing after it."""
        right = sum(a == b for a, b in zip(problem.answer, completion, strict=False))
        return right / max(len(problem.answer), len(completion))


def _pair(row: tuple[int, ...]) -> tuple[str, str]:
    """The prompt and the answer of a row of digits."""
    return "".join(map(str, row)) + "=", "".join(str(total % 10) for total in accumulate(row))
