"""Two columns of a capsule's tokens, compared to the bit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...verify.difference import Difference
from ...verify.mismatch import first_unequal_bits
from ..conclusion.outcome import Tolerances
from ..figures.bands import Corrections, band_figures
from ..figures.measure import Figures, measure
from ..formats.record import LoggedRollout

# Logprobs [C] fp32 of each completion; NaN where there is none.
Column = Sequence[np.ndarray]


@dataclass(frozen=True)
class Pair:
    """One comparison. gate: whether it decides the outcome where no tolerance is given."""

    name: str
    figures: Figures
    corrections: Corrections
    first: Difference | None
    gate: bool

    def holds(self, tolerances: Tolerances) -> bool:
        """Whether the bits are equal, or a tolerance that was given holds."""
        return self.figures.equal or (tolerances.given and tolerances.hold(self.figures, self.corrections))


def compare(name: str, before: Column, now: Column, rollouts: Sequence[LoggedRollout], gate: bool) -> Pair:
    """Compare two columns over the tokens that both have. Raises ValueError where there is none."""
    kept_before, kept_now, first = [], [], None
    for index, (b, n, rollout) in enumerate(zip(before, now, rollouts, strict=True)):
        both = ~(np.isnan(b) | np.isnan(n)) & rollout.drawn()
        position = first_unequal_bits(*(np.where(both, column, np.nan) for column in (b, n)))
        if first is None and position is not None:
            values, token = (float(b[position]), float(n[position])), rollout.completion_ids[position]
            # Two numbers of other bits may look alike.
            bits = " and ".join(f"{np.float32(x).view(np.uint32):08x}" for x in values)
            place = f"completion {index}, position {position}"
            first = Difference(place, values, f"(token {token})", note=f" (bits {bits})")
        if both.any():
            kept_before.append(b[both])
            kept_now.append(n[both])
    if not kept_before:
        raise ValueError(f"capsule: {name}: no token has both logprobs")
    figures, corrections = measure(kept_now, kept_before), band_figures(kept_now, kept_before)
    return Pair(name, figures, corrections, first, gate)
