"""A task that a small instruct model half knows: count from one number to another, and write nothing else."""

from difflib import SequenceMatcher

from zerokl.engine.tasks.base import Problem, random_integers, split_problems


class Counting:
    """Problems such as "Count from 7 to 12.", with the answer "7, 8, 9, 10, 11, 12".

    The reward is how similar the completion is to the answer: twice the characters that both have in the same
    order, as a share of the characters of both (difflib). So digits and commas are worth something already.
    """

    chat = True

    def __init__(self, train: int = 256, held_out: int = 32, largest: int = 40, seed: int = 0):
        n = train + held_out
        first = random_integers(n, 0, largest, seed, 0)
        count = random_integers(n, 3, 8, seed, 1)
        self._splits = split_problems(
            [_problem(a, a + c) for a, c in zip(first, count, strict=True)], train, held_out, "counting"
        )

    def problems(self, split: str) -> list[Problem]:
        """See Task."""
        return self._splits[split]

    def reward(self, problem: Problem, completion: str) -> float:
        """In 0 to 1; 1.0 for the answer itself."""
        return SequenceMatcher(None, completion, problem.answer, autojunk=False).ratio()


def _problem(first: int, last: int) -> tuple[str, str]:
    prompt = f"Count from {first} to {last}. Write only the numbers, with commas between them."
    return prompt, ", ".join(map(str, range(first, last + 1)))
