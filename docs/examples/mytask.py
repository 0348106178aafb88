"""A task of one's own, and a reward of one's own: "lamp>" is to become "pmal"."""

from difflib import SequenceMatcher

from zerokl.engine.tasks.base import Problem, random_integers, split_problems

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Reverse:
    """Distinct words of `length` random letters, to be written backwards."""

    chat = False  # the prompt goes to the model as it is
    binary = True  # its own reward is 0 or 1: the mean is an accuracy

    def __init__(self, length: int = 4, train: int = 512, held_out: int = 128, seed: int = 0):
        if not 1 <= length <= 20:
            raise ValueError(f"task reverse: length ({length}) must lie in 1 to 20")
        n = 2 * (train + held_out)  # room for words that are drawn twice
        drawn = random_integers(n * length, 0, 25, seed, word=0).reshape(n, length)
        words = dict.fromkeys("".join(LETTERS[i] for i in row) for row in drawn.tolist())
        pairs = [(f"{word}>", word[::-1]) for word in words]
        self._splits = split_problems(pairs, train, held_out, "reverse")

    def problems(self, split: str) -> list[Problem]:
        """All problems of "train" or "held_out", the same in every call."""
        return self._splits[split]

    def reward(self, problem: Problem, completion: str) -> float:
        """1.0 for the word backwards, else 0.0."""
        return float(completion == problem.answer)


def closeness(problem: Problem, completion: str) -> float:
    """Between 0.0 and 1.0: how much of the answer the completion has, in the right order."""
    return SequenceMatcher(None, completion, problem.answer).ratio()
