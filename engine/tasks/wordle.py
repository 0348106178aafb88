"""Wordle: "word>" -> "cab", to which the environment says a sign for each letter, "+.-", until it is found.

+   the letter stands here      .   it stands elsewhere      -   the word has no more of it
"""

from collections import Counter
from random import Random

from .base import Problem, SplitTask
from .environment import EnvironmentKey, Observation

_PROMPT = "word>"


class WordleEnvironment:
    """One game. Finding the word within the guesses has the reward 1."""

    def __init__(self, guesses: int):
        self._left = guesses

    def reset(self, problem: Problem, key: EnvironmentKey) -> str:
        self._word = problem.answer
        return problem.prompt

    def step(self, ids: list[int], text: str) -> Observation:
        if text == self._word:
            return Observation(reward=1.0, done=True)
        self._left -= 1
        return Observation(f"{signs(text, self._word)}>", done=not self._left)


class Wordle(SplitTask):
    """Words of `length` letters out of the first `letters` of the alphabet; `words` of them, at random.

    Train and held-out problems have the same words, because only those can be learnt by heart.
    """

    def __init__(
        self,
        length: int = 3,
        letters: int = 6,
        words: int = 24,
        guesses: int = 4,
        train: int = 96,
        held_out: int = 24,
        seed: int = 0,
    ):
        if not (1 <= length <= 8 and 2 <= letters <= 26 and 1 <= words <= letters**length and guesses >= 1):
            raise ValueError(
                f"task wordle: length ({length}) must lie in 1 to 8, letters ({letters}) in 2 to 26, words "
                f"({words}) in 1 to letters^length, and guesses ({guesses}) be at least 1"
            )
        rng, alphabet = Random(seed), "abcdefghijklmnopqrstuvwxyz"[:letters]
        drawn: dict[str, None] = {}
        while len(drawn) < words:
            drawn["".join(rng.choices(alphabet, k=length))] = None
        self.words, self._guesses = list(drawn), guesses
        self._splits = {
            split: [Problem(i, _PROMPT, self.words[i % words]) for i in range(n)]
            for split, n in (("train", train), ("held_out", held_out))
        }

    def environment(self) -> WordleEnvironment:
        return WordleEnvironment(self._guesses)

    def demonstration(self, problem: Problem) -> list[str]:
        """Guesses that all signs so far allow, in a random order; the word is the last one at the latest."""
        possible, guesses, rng = list(self.words), [], Random(problem.id)
        while len(guesses) < self._guesses - 1 and problem.answer not in guesses:
            guesses.append(rng.choice(possible))
            shown = signs(guesses[-1], problem.answer)
            possible = [word for word in possible if signs(guesses[-1], word) == shown]
        return guesses if problem.answer in guesses else [*guesses, problem.answer]


def signs(guess: str, word: str) -> str:
    """A sign for each letter of a guess; "?" for one of another length."""
    if len(guess) != len(word):
        return "?"
    left = Counter(b for a, b in zip(guess, word, strict=True) if a != b)
    result = ""
    for a, b in zip(guess, word, strict=True):
        elsewhere = a != b and left[a] > 0
        left[a] -= elsewhere
        result += "+" if a == b else "." if elsewhere else "-"
    return result
