"""Guessers for tests of guessed tokens: they are right or wrong as they are told."""

from collections.abc import Callable, Sequence

import numpy as np
from zerokl.engine.rollout.types import Request, Rollout

Propose = Callable[[Request, Sequence[int], int], Sequence[int]]


class Guesser:
    """Guesses what a function says, also where no guess is worth it."""

    def __init__(self, propose: Propose):
        self.propose = propose

    def ended(self, request: Request, tokens: Sequence[int]) -> None:
        pass


class Oracle(Guesser):
    """Knows what is drawn, and guesses it wrongly where it is told to. vocab: ids are below it."""

    def __init__(
        self, rollouts: Sequence[Rollout], wrong: Callable[[int], bool] = lambda n: False, vocab: int = 64
    ):
        self._ids = {(r.prompt, r.sample): r.ids for r in rollouts}
        self._vocab, self._wrong = vocab, wrong

    def propose(self, request: Request, tokens: Sequence[int], k: int) -> Sequence[int]:
        start = len(request.ids) + len(tokens)
        ids = self._ids[request.rng_key.prompt, request.rng_key.sample][start : start + k]
        return [(t + self._wrong(start + i)) % self._vocab for i, t in enumerate(ids)]


def hostile(seed: int, vocab: int = 64, stops: int = 6) -> Propose:
    """Ids at random: too many of them, ids that the model does not have, and those below `stops`."""
    numbers = np.random.default_rng(seed)

    def propose(request: Request, tokens: Sequence[int], k: int) -> Sequence[int]:
        kind = numbers.integers(5)
        if kind == 0:
            return []
        high = (vocab, stops, vocab, vocab)[kind - 1]
        return numbers.integers(-1 if kind == 4 else 0, high, 3 * k if kind == 3 else k).tolist()

    return propose
