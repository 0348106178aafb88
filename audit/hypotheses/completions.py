"""A completion's rewards and advantages, as a log says them, and the groups that completions are in."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from ...files.reading import first_few
from ..formats.record import LoggedRollout

# How far numbers that are meant to be one may be apart, as a share of the largest: half of a bf16's last bit
# is 2^-9.
CLOSE = 2.0**-8
# Lines that a fault names.
_NAMED = 4
_NO_ADVANTAGE = (None,)


class Completion(NamedTuple):  # one for each line of the log: a frozen dataclass takes five times as long
    """What a log says of one completion beside its log-probabilities."""

    place: str  # file and line
    group: Hashable
    step: int | None
    sample: Hashable
    turn: int | None
    reward: float | None
    # Of each drawn part, the parts of tools left out: the advantage of its tokens. None where the log has
    # none, NaN where it is no number or where the tokens of the part differ.
    advantages: tuple[float | None, ...]
    numbers: bool  # whether every advantage of a drawn token is a number
    tokens: int
    last: int  # the last id
    truncated: bool | None  # whether a limit ended it, where the log says so


def completion_of(place: str, line: LoggedRollout, before: Completion | None) -> Completion:
    """What is kept of a line. before: of the line before, whose equal group is shared: it saves memory."""
    drawn, advantage = line.drawn(), line.advantage
    if isinstance(advantage, tuple):
        values, places = np.array(advantage, np.float64)[drawn], np.flatnonzero(drawn)
        parts = tuple(_same(x) for x in np.split(values, np.flatnonzero(np.diff(places) > 1) + 1) if len(x))
        numbers = bool(np.isfinite(values).all())
    else:
        parts = _NO_ADVANTAGE if advantage is None else (advantage,)
        numbers = advantage is None or math.isfinite(advantage)
    group = (line.step, line.prompt if line.prompt is not None else hash(line.prompt_ids))
    if before and before.group == group:
        group = before.group
    return Completion(
        place,
        group,
        group[0],
        (line.prompt, line.sample),
        line.turn,
        line.reward,
        parts,
        numbers,
        int(np.count_nonzero(drawn)),
        line.completion_ids[-1],
        line.truncated,
    )


def _same(values: np.ndarray) -> float:
    """The one value of a drawn part; NaN where there are several, or where one is no number."""
    if not np.isfinite(values).all() or np.ptp(values) > CLOSE * np.abs(values).max():
        return float("nan")
    return float(values[0])


def grouped(completions: Sequence[Completion]) -> list[Completion]:
    """The completions with their groups.

    Labels say the groups, unless one completion of a group comes twice. Else neighbours of one prompt are a
    group, because a prompt may come again later. In a log that has steps but no labels, where no neighbours
    have one prompt, all of one prompt and step are.
    """
    labels = Counter((x.group, x.sample) for x in completions)
    unlike = [a.group != b.group for a, b in pairwise(completions)]
    labelled = all(x.sample[0] is not None for x in completions)
    known = max(labels.values(), default=1) == 1 if labelled else all(unlike)
    if known and (labelled or all(x.step is not None for x in completions)):
        return list(completions)
    return [
        x._replace(group=(x.group, run))
        for x, run in zip(completions, accumulate(unlike, initial=0), strict=True)
    ]


def by_group(completions: Sequence[Completion]) -> list[list[Completion]]:
    """The completions of each group."""
    groups: dict[Hashable, list[Completion]] = defaultdict(list)
    for x in completions:
        groups[x.group].append(x)
    return list(groups.values())


def named(completions: Sequence[Completion]) -> str:
    """The places of some completions, in words."""
    places = list(dict.fromkeys(x.place for x in completions))
    first, *others = places
    file = first.rpartition(", ")[0]
    return first_few([first, *(x.removeprefix(f"{file}, ") for x in others)], _NAMED)
