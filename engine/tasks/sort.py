"""Sorting: "52914>" -> "12459"."""

from .base import Problem, SplitTask, random_integers, split_problems


class Sort(SplitTask):
    """Distinct strings of min_digits .. max_digits random digits. The answer has them in ascending order."""

    def __init__(
        self, min_digits: int = 3, max_digits: int = 6, train: int = 512, held_out: int = 256, seed: int = 0
    ):
        if not 1 <= min_digits <= max_digits <= 512:
            raise ValueError(
                f"task sort: min_digits ({min_digits}) must be at least 1, "
                f"and max_digits ({max_digits}) at least min_digits and at most 512"
            )
        n = 2 * (train + held_out)  # more than needed: duplicates are dropped
        lengths = random_integers(n, min_digits, max_digits, seed, word=0)
        digits = random_integers(n * max_digits, 0, 9, seed, word=1).reshape(n, max_digits)
        texts = dict.fromkeys(
            "".join(map(str, row[:length]))
            for row, length in zip(digits.tolist(), lengths.tolist(), strict=True)
        )
        self._splits = split_problems([(t + ">", "".join(sorted(t))) for t in texts], train, held_out, "sort")

    def reward(self, problem: Problem, completion: str) -> float:
        """1.0 for the sorted string, else 0.0."""
        return float(completion == problem.answer)
