"""A task that a small instruct model half knows: count in the asked way, and write nothing else."""

from difflib import SequenceMatcher

from zerokl.engine.tasks.base import Problem, random_integers, split_problems


class Counting:
    """Problems such as "Count from 7 to 12.", with the answer "7, 8, 9, 10, 11, 12".

    An answer has 1 + fewest to 1 + most numbers. widest: the largest step from one to the next; above 1, each
    problem has a step of its own, and its text names it.

    The reward is how similar the completion is to the answer: twice the characters that both have in the same
    order, as a share of the characters of both (difflib). So digits and commas are worth something already.
    """

    chat = True

    def __init__(
        self,
        train: int = 256,
        held_out: int = 32,
        largest: int = 40,
        fewest: int = 3,
        most: int = 8,
        widest: int = 1,
        seed: int = 0,
    ):
        n = train + held_out
        first = random_integers(n, 0, largest, seed, 0)
        count = random_integers(n, fewest, most, seed, 1)
        step = random_integers(n, 1, widest, seed, 2)
        numbers = [range(a, a + c * s + 1, s) for a, c, s in zip(first, count, step, strict=True)]
        problems = [_problem(x, widest > 1) for x in numbers]
        self._splits = split_problems(problems, train, held_out, "counting")

    def problems(self, split: str) -> list[Problem]:
        return self._splits[split]

    def reward(self, problem: Problem, completion: str) -> float:
        """In 0 to 1; 1.0 for the answer itself."""
        return SequenceMatcher(None, completion, problem.answer, autojunk=False).ratio()


def _problem(numbers: range, names_step: bool) -> tuple[str, str]:
    how = f" in steps of {numbers.step}" if names_step else ""
    prompt = (
        f"Count from {numbers[0]} to {numbers[-1]}{how}. Write only the numbers, with commas between them."
    )
    return prompt, ", ".join(map(str, numbers))
