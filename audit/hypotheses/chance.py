"""What a hypothesis explains by its freedom alone.

A hypothesis that chooses among many lines, places, shifts or values comes near to any log, and the nearer the
fewer tokens there are to agree with. So it is tried again on shuffled logs, with the same freedom:

- Where each line has a choice of its own, the numbers of a place go to other lines. No line's numbers are
  then those of one line, and what places have in common stays.
- Where one choice is made for all lines, the differences go to other tokens. They are then as large as
  before, and follow nothing.

It fits where the odds of what it explains, explained : left, are several times those of the shuffled logs.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .evidence import Evidence
from .judgement import ODDS, SHUFFLES, SHUFFLES_BESIDE_MODEL


def is_beyond_chance(share_left: float, left_by_chance: float) -> bool:
    """Whether a hypothesis explains clearly more than its freedom does. Both are shares of the difference."""
    return (1.0 - share_left) * left_by_chance >= ODDS * (1.0 - left_by_chance) * share_left


def shuffled_logs(evidence: Evidence, by_line: bool) -> list[Evidence]:
    """The same lines with shuffled numbers. by_line: whether the choice is made for each line."""
    logged = [x.logged.astype(np.float64) for x in evidence.lines]
    scored = [x.scored.astype(np.float64) for x in evidence.lines]
    known = [np.isfinite(x) & np.isfinite(y) for x, y in zip(logged, scored, strict=True)]
    shuffle = _among_lines if by_line else _among_tokens
    logs = []
    for number in range(SHUFFLES_BESIDE_MODEL if evidence.scorer else SHUFFLES):
        new = shuffle(logged, scored, known, number)
        lines = [replace(x, logged=y.astype(np.float32)) for x, y in zip(evidence.lines, new, strict=True)]
        logs.append(replace(evidence, lines=lines))
    return logs


def _among_lines(
    logged: Sequence[np.ndarray], scored: Sequence[np.ndarray], known: Sequence[np.ndarray], number: int
) -> list[np.ndarray]:
    """The numbers of each place of a completion among the lines that have one there."""
    new = [x.copy() for x in logged]
    for place in range(max(map(len, logged))):
        lines = [i for i, x in enumerate(known) if place < len(x) and x[place]]
        for i, j in zip(lines, _order(lines, number, place), strict=True):
            new[i][place] = logged[j][place]
    return new


def _among_tokens(
    logged: Sequence[np.ndarray], scored: Sequence[np.ndarray], known: Sequence[np.ndarray], number: int
) -> list[np.ndarray]:
    """The differences among all tokens. What comes above 0 is turned back: 0 itself would mean something."""
    where, flat = np.concatenate(known), np.concatenate(logged)
    base = np.concatenate(scored)[where]
    flat[where] = -np.abs(base + _order(flat[where] - base, number))
    return np.split(flat, np.cumsum([len(x) for x in logged])[:-1])


def _order(x: Sequence, number: int, place: int = 0) -> np.ndarray:
    """x in the random order of a key."""
    return np.random.Generator(np.random.Philox(key=[number, place])).permutation(x)
