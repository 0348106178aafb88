"""Speculation: turns that draw several tokens of a trajectory, where its next tokens were guessed.

A turn has a row for a sample's last token, and one for each guessed token after it (decode.py). By the law a
row's bits are those of its own sequence. So where a guess is the token that is drawn in its place, the next
row has drawn what the next turn would have drawn: from the same logits, with the number of the same key. The
first guess that is not drawn ends the turn for its sample. Nothing is accepted or refused by chance, and the
tokens, their log-probabilities and the ledger are those without guesses, whatever is guessed.

How many tokens are guessed follows from the share of guesses that were drawn, and decides speed only. A turn
of R rows takes about as long as F + R rows would without what a turn costs anyway. So of n samples that are
drawn together, a guess pays where its chance to be drawn is at least n / (n + F).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from .decode import DrawnToken
from .guesser import Guesser
from .types import Request

# F. On a CPU turns of 1 to 128 samples were measured: 16 to 46 with a Qwen3 of 2.3M weights after 256 and 8
# tokens, and 16 to 25 with SmolLM2-135M. On an H200 a turn of a 0.6B takes 2.14 ms with 64 rows and 4.87 ms
# with 256.
_FREE_ROWS, _FREE_ROWS_OF_GPU = 24, 87
# Where no guess is worth it, one turn of a sample in so many has one, to see whether it is again.
_PROBE = 16
# Guesses of all samples that the chance of a sample begins with.
_PRIOR = 2.0
# What a turn counts after the next one: in the chance of a sample, and in that of all samples.
_FADE, _FADE_OF_ALL = 0.9, 0.995


@dataclass
class _Chance:
    """The chance of late that a guess is drawn, where all guesses before it in its turn were."""

    fade: float
    drawn: float
    tried: float

    def add(self, drawn: int, tried: int) -> None:
        self.drawn = self.fade * self.drawn + drawn
        self.tried = self.fade * self.tried + tried

    @property
    def share(self) -> float:
        """The chance."""
        return self.drawn / self.tried

    def worth(self, least: float) -> float:
        """The number of guesses of which the last one is drawn with a chance of `least` at least."""
        if not 0 < self.share < 1:
            return math.inf if self.share else 0
        return math.log(least) / math.log(self.share)


class Speculation:
    """What the samples of a sampler have in common.

    k: guesses of one turn of a sample at most. vocab: ids are below it.
    """

    def __init__(self, guesser: Guesser, k: int, vocab: int, device: torch.device):
        self.guesser, self.k, self.vocab = guesser, k, vocab
        self.free_rows = _FREE_ROWS_OF_GPU if device.type == "cuda" else _FREE_ROWS
        self.chance = _Chance(_FADE_OF_ALL, 1.0, 1.0)
        self._not_worth = 0  # turns of samples

    def probe(self) -> bool:
        """Whether a turn of a sample has a guess although none is worth it."""
        self._not_worth += 1
        return self._not_worth % _PROBE == 0

    def begin(self, request: Request, tokens: Sequence[int]) -> "SampleGuesses":
        """The guesses for a request. tokens: a list to which those that are drawn are appended."""
        return SampleGuesses(self, request, tokens)


class SampleGuesses:
    """The guesses for one request, from turn to turn."""

    def __init__(self, speculation: Speculation, request: Request, tokens: Sequence[int]):
        self._speculation, self._request, self._tokens = speculation, request, tokens
        share = speculation.chance.share
        self._chance = _Chance(_FADE, _PRIOR * share, _PRIOR)
        self._failed = False

    def next(self, n: int) -> list[int]:
        """Guesses for the next turn, of n samples.

        They are ids that the model has, fewer than the tokens that may be drawn, and none from a stop id on:
        nothing is drawn after it.
        """
        k = min(self._places(n), self._request.max_tokens - len(self._tokens) - 1)
        if self._failed or k < 1:
            self._failed = False
            return []
        guess = self._speculation.guesser.propose(self._request, self._tokens, k)[:k]
        vocab, stop_ids = self._speculation.vocab, self._request.draw_params.stop_ids
        return list(takewhile(lambda token: 0 <= token < vocab and token not in stop_ids, guess))

    def stand(self, guess: Sequence[int], drawn: Sequence[DrawnToken]) -> int:
        """How many tokens of the sample's rows stand: those before and at the first that was not guessed.

        None does where a log-probability is not finite. A guess may be a token that overflows in the model,
        and a key that is not finite reaches the rows before it. So the next turn has no guess, and decides.
        """
        if not guess:
            return 1
        if not all(math.isfinite(token.logprob) for token in drawn):
            self._failed = True
            return 0
        pairs = zip(guess, drawn[:-1], strict=True)
        hits = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].id, pairs))
        self.count(hits, len(guess))
        return hits + 1

    def count(self, hits: int, guesses: int) -> None:
        """So many of a turn's guesses stand. The chance follows them."""
        for chance in (self._chance, self._speculation.chance):
            chance.add(hits, min(hits + 1, guesses))

    def ended(self) -> None:
        """The request draws no more tokens."""
        self._speculation.guesser.ended(self._request, self._tokens)

    def _places(self, n: int) -> int:
        least = n / (n + self._speculation.free_rows)
        worth = int(min(self._chance.worth(least), self._speculation.k))
        return worth or int(self._speculation.probe())
