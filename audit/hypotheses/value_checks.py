"""What stands in a column of log-probabilities and is none: counted by kind, taken out, and a fault.

Every column is asked before anything is computed from it: the sampler's and the trainer's of a log, in every
line of the file, and the scores of a model. Beside a token that was drawn, these are no log-probabilities:

    null         there is no number. A column that has none in the whole log is unknown; that is no fault.
    NaN, +Infinity
    -Infinity    in the sampler's column always, because the token was drawn; in another one unless a cut is
                 declared
    above 0      by more than 16 bits round
    -9999        and other constants that stand for a missing number

What stands beside other tokens does not matter.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from ...kernels.sampling_params import SamplingParams
from ..faults.columns import no_logprobs
from ..faults.fault import LogFault
from ..formats.record import LoggedRollout, is_logged_nan, least_and_most

# A log-probability is at most 0. In 16 bits, logit - logsumexp can round to a little more.
_HIGHEST = 2.0**-6
# A log-probability is a logit's distance from the log-sum-exp. The logits of trained models lie within some
# hundreds of each other, and a temperature below 1 stretches them by its inverse. Nothing real is below this.
_LOWEST = -1000.0
# A whole number below the first bound is a constant if it stands here so often, and makes so much of all
# numbers as low. Real ones are rarer than exp(-64), and in fp32, where neighbours are 2^-17 apart, one in
# 10^5 of them is whole. In bf16 every other one is whole; hence the count, and the share.
_DEEP, _REPEATS, _SHARE = -64.0, 3, 0.5
# Constants that are named one by one.
_NAMED = 3


@dataclass(frozen=True)
class NoLogprobs:
    """Values of one kind in a column that are no log-probabilities."""

    column: str
    kind: str
    tokens: int
    drawn: int  # drawn tokens of the file that the column stands beside
    lines: int
    first: str  # file, line and position

    def words(self) -> str:
        """How many there are, and where."""
        lines = "1 line" if self.lines == 1 else f"{self.lines:,} lines"
        count = f"{self.tokens:,} of {self.drawn:,} drawn tokens"
        return f"{count} have {self.kind}, in {lines}, the first at {self.first}"


class ColumnValues:
    """Takes a column line by line: counts what is no log-probability, and hands back the rest.

    stand_ins: constants that an earlier reading of the whole file has shown to stand for a missing number.
    """

    def __init__(self, column: str, stand_ins: frozenset[float] = frozenset()):
        self.column = column
        self.drawn = self.known = 0
        self._stand_ins = np.array(sorted(stand_ins), np.float32)
        self._kinds: dict[str, list] = {}  # kind -> tokens, lines, place of the first one
        self._constants: set[float] = set()
        self._deep = 0  # numbers below _DEEP, and those of them that are whole
        self._whole: Counter[float] = Counter()

    def taken(
        self, place: str, column: np.ndarray, drawn: np.ndarray, params: SamplingParams | None, cut: bool
    ) -> np.ndarray:
        """The column with NaN for what is no log-probability, [C] fp32.

        drawn: [C] bool. cut: whether the column may give a drawn token the probability 0.
        """
        # A log has 10^6 lines, and nearly all hold ordinary numbers alone. A NaN is within no bounds.
        least, most = least_and_most(column)
        if least >= _DEEP and most <= _HIGHEST and np.count_nonzero(drawn) == len(column):
            self.drawn += len(column)
            self.known += len(column)
            return column
        temperature = min(1.0, params.temperature if params and params.temperature else 1.0)
        wrong = ~((column <= _HIGHEST) & (column >= _LOWEST / temperature)) | np.isin(column, self._stand_ins)
        wrong &= drawn & ~(np.isneginf(column) & cut)
        deep = column[drawn & ~wrong & (column < _DEEP) & np.isfinite(column)]
        self._deep += len(deep)
        self._whole.update(deep[deep == np.floor(deep)].tolist())
        self.drawn += int(drawn.sum())
        self.known += int(drawn.sum() - wrong.sum())
        if not wrong.any():
            return column
        positions = np.flatnonzero(wrong)
        bits, firsts, counts = np.unique(column[wrong].view(np.uint32), return_index=True, return_counts=True)
        kinds: Counter[str] = Counter()
        for i in np.argsort(firsts).tolist():
            kind = self._kind(bits[i : i + 1].view(np.float32))
            kinds[kind] += int(counts[i])
            self._kinds.setdefault(kind, [0, 0, f"{place}, position {positions[firsts[i]]}"])
        for kind, count in kinds.items():
            self._kinds[kind][0] += count
            self._kinds[kind][1] += 1
        return np.where(wrong, np.float32(np.nan), column)

    def _kind(self, x: np.ndarray) -> str:
        """The kind of one value, [1] fp32."""
        if np.isnan(x):
            return "NaN" if is_logged_nan(x) else "null"
        if np.isinf(x):
            return "+Infinity" if x > 0 else "-Infinity"
        if x > 0:
            return "a number above 0"
        if len(self._constants) < _NAMED:
            self._constants.add(float(x[0]))
        return f"{x[0]:g}" if float(x[0]) in self._constants else "another constant"

    def stand_ins(self) -> frozenset[float]:
        """Whole numbers that repeat where a real log-probability is all but impossible."""
        least = max(_REPEATS, _SHARE * self._deep)
        return frozenset(x for x, count in self._whole.items() if count >= least)

    def counts(self) -> list[NoLogprobs]:
        """What is no log-probability, by kind; nothing of a column that holds null alone."""
        if not self.known and set(self._kinds) <= {"null"}:
            return []
        return [
            NoLogprobs(self.column, kind, tokens, self.drawn, lines, first)
            for kind, (tokens, lines, first) in self._kinds.items()
        ]

    def fault(self) -> LogFault | None:
        """The fault of the column; None where it holds log-probabilities alone."""
        if not (counts := self.counts()):
            return None
        kinds = [x.kind for x in counts]
        listed = " and ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
        return no_logprobs.FAULT.named(
            f"{'; '.join(x.words() for x in counts)}. None of these is a log-probability, and the "
            "figures leave them out.",
            kinds=listed,
            column=self.column,
        )


def may_cut(params: SamplingParams | None) -> bool:
    """Whether a trainer may give a drawn token the probability 0: only by a cut that is declared."""
    return params is not None and params.cuts


class LogValues:
    """The sampler's and the trainer's column of a log. stand_ins: see ColumnValues."""

    def __init__(self, stand_ins: Mapping[str, frozenset[float]] = MappingProxyType({})):
        self.columns = {
            name: ColumnValues(f"the {side}'s", stand_ins.get(name, frozenset()))
            for name, side in (("logprobs", "sampler"), ("trainer_logprobs", "trainer"))
        }

    def taken(self, place: str, rollout: LoggedRollout, drawn: np.ndarray) -> LoggedRollout:
        """A completion with NaN for what is no log-probability. drawn: [C] bool, the tokens to judge."""
        place = place if rollout.turn is None else f"{place}, turn {rollout.turn}"
        params, taken = rollout.sampling_params, {}
        for name, column in self.columns.items():
            if (values := getattr(rollout, name)) is not None:
                cut = name == "trainer_logprobs" and (may_cut(params) or rollout.sampling_mask is not None)
                left = column.taken(place, values, drawn, params, cut)
                if left is not values:
                    taken[name] = left
        return replace(rollout, **taken) if taken else rollout

    def stand_ins(self) -> dict[str, frozenset[float]]:
        """The constants of each column that stand for a missing number; empty where there are none."""
        return {name: constants for name, x in self.columns.items() if (constants := x.stand_ins())}

    def counts(self) -> list[NoLogprobs]:
        """What is no log-probability, by column and kind."""
        return [count for x in self.columns.values() for count in x.counts()]

    def faults(self) -> list[LogFault]:
        """The fault of each column that has one."""
        return [fault for x in self.columns.values() if (fault := x.fault())]
