"""Nim: two players take 1 to 3 stones by turns, and whoever takes the last one wins. "11>" -> "3".

The model plays both sides and both are trained (self-play, as in SPIRAL, arXiv:2506.24119): a player's group
are the games in which it moves first, or second, from the same number of stones. In the held-out problems the
environment plays the second player without an error, from numbers at which the first one can win.

Two players that have become certain of their moves play one game again and again, and learn nothing more. A
KL term (loss.kl_coef) keeps them from that.
"""

import re
from random import Random

from ...kernels.philox import Stream, permutation
from .base import Problem, SplitTask
from .environment import EnvironmentKey, Observation

_MOST = 3  # stones of a move
_MOVE = re.compile(r"[1-3]")


class NimEnvironment:
    """One game. Winning has the reward 1, losing 0. An illegal move ends the game, and nobody has won."""

    players = 2

    def reset(self, problem: Problem, key: EnvironmentKey) -> str:
        self._stones, self._player = int(problem.prompt.rstrip(">")), 0
        self._alone = problem.answer == _AGAINST_PERFECT
        return problem.prompt

    def step(self, ids: list[int], text: str) -> Observation:
        if not _MOVE.fullmatch(text) or int(text) > self._stones:
            return Observation(done=True)
        self._stones -= int(text)
        if self._alone and self._stones:
            self._stones -= best_move(self._stones)
            return self._next(0, winner=1)
        return self._next(1 - self._player, winner=self._player)

    def _next(self, player: int, winner: int) -> Observation:
        """What the next player reads; or the end of the game, which `winner` has won."""
        if not self._stones:
            return Observation(reward=[float(winner == 0), float(winner == 1)], done=True)
        self._player = player
        return Observation(f"{self._stones}>", player=player)


_SELF_PLAY, _AGAINST_PERFECT = "self-play", "against a perfect player"


class Nim(SplitTask):
    """Games that begin with 1 to max_stones stones. Held out are those that the first player can win."""

    def __init__(self, max_stones: int = 20, train: int = 64, held_out: int = 32, seed: int = 0):
        if not 4 <= max_stones <= 200:
            raise ValueError(f"task nim: max_stones ({max_stones}) must lie in 4 to 200")
        stones = [1 + i % max_stones for i in permutation(train, seed, Stream.PROBLEMS).tolist()]
        winnable = [n for n in range(1, max_stones + 1) if n % (_MOST + 1)][:held_out]
        self._splits = {
            "train": [Problem(i, f"{n}>", _SELF_PLAY) for i, n in enumerate(stones)],
            "held_out": [Problem(i, f"{n}>", _AGAINST_PERFECT) for i, n in enumerate(winnable)],
        }

    def environment(self) -> NimEnvironment:
        return NimEnvironment()

    def demonstration(self, problem: Problem) -> list[str]:
        """Random legal moves of both players."""
        stones, moves, rng = int(problem.prompt.rstrip(">")), [], Random(problem.id)
        while stones:
            moves.append(str(rng.randint(1, min(_MOST, stones))))
            stones -= int(moves[-1])
        return moves


def best_move(stones: int) -> int:
    """A move that leaves a multiple of 4 where there is one; else 1."""
    return stones % (_MOST + 1) or 1
