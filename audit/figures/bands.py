"""What a mismatch costs a correction, and the bands that a test in CI can ask for.

    r = exp(logp_trainer - logp_sampler)     of a token

A correction by truncation (TIS) cuts a ratio that is above its bound. A correction by masking (MIS) drops the
sequence. A band looks at the geometric mean of r over each sequence, as sequence masking does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...verify.mismatch import log_ratios, ratios
from ...verify.mismatch import mean as mean_of
from ..frameworks import FRAMEWORKS
from .gates import GateFigure, joined

# Lowest and highest geometric mean of a sequence's ratios. strict: the bounds with which NeMo-RL masks
# sequences in its guide to ProRL v2.
BANDS = {"strict": (0.999, 1.002), "1%": (0.99, 1.01), "5%": (0.95, 1.05)}
# The projects that gate on a figure of their own, each with its gate.
GATES = {name: framework.gate for name, framework in FRAMEWORKS.items() if framework.gate}
_BOUNDS = (2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True)
class BandShare:
    """A band, and the share of sequences outside of it."""

    low: float
    high: float
    sequences_outside: float


@dataclass(frozen=True)
class Cut:
    """What a correction with a bound cuts: the shares above it, and the mean ratio before and after."""

    bound: float
    tokens: float
    sequences: float
    mean_ratio: float
    mean_truncated: float


@dataclass(frozen=True)
class Corrections:
    """What a mismatch costs a correction."""

    bands: dict[str, BandShare]  # by name
    geometric_mean_min: float
    geometric_mean_max: float
    cut: list[Cut]  # by rising bound
    gates: dict[str, GateFigure] = field(default_factory=dict)  # by the project that gates on it

    def in_band(self, band: str) -> bool:
        """Whether every sequence lies in a band, or a project's bound holds."""
        if band in self.gates:
            return self.gates[band].holds
        return self.bands[band].sequences_outside == 0.0


def band_figures(trainer: Sequence[np.ndarray], sampler: Sequence[np.ndarray]) -> Corrections:
    """For each band the share of sequences outside, and for each bound what is cut.

    trainer, sampler: logprobs [C] fp32 of each sequence, without NaN.
    """
    columns = joined(trainer, sampler)
    d = log_ratios(columns.trainer, columns.sampler)
    r, sequence_ratios = ratios(d, columns.lengths)
    starts = np.concatenate([[0], np.cumsum(columns.lengths)[:-1]])
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.exp(np.add.reduceat(d, starts) / columns.lengths)
    return Corrections(
        {
            name: BandShare(low, high, _share(~((mean >= low) & (mean <= high))))
            for name, (low, high) in BANDS.items()
        },
        float(mean.min()),
        float(mean.max()),
        [
            Cut(
                bound,
                _share(~(r <= bound)),
                _share(~(sequence_ratios <= bound)),
                mean_of(r),
                mean_of(np.minimum(r, bound)),
            )
            for bound in _BOUNDS
        ],
        {name: gate.judged(columns) for name, gate in GATES.items()},
    )


def _share(marked: np.ndarray) -> float:
    return float(marked.mean())


def band_lines(corrections: Corrections, band: str | None) -> list[str]:
    """The figures as sentences for the terminal. band: the one that was asked for."""
    lines = []
    if band in corrections.gates:
        gate = corrections.gates[band]
        held = "holds" if gate.holds else "does not hold"
        lines.append(f"Band {band} {held}: {gate.figure}, is {gate.value:.4g}; the bound is {gate.bound:g}.")
    elif band is not None:
        row = corrections.bands[band]
        held = "holds" if corrections.in_band(band) else "does not hold"
        lines.append(
            f"Band {band} {held}: the geometric mean ratio of a sequence lies in "
            f"{corrections.geometric_mean_min:.6g} .. {corrections.geometric_mean_max:.6g}, "
            f"and the band is {row.low:g} .. {row.high:g}; "
            f"{row.sequences_outside:.2%} of the sequences lie outside."
        )
    cut = [row for row in corrections.cut if row.tokens or row.sequences]
    if cut:
        lines += [
            f"A correction with the bound {row.bound:g} cuts {row.tokens:.2%} of the tokens (TIS), or "
            f"masks {row.sequences:.2%} of the sequences (MIS). The mean ratio of the tokens is "
            f"{row.mean_ratio:.4g} before TIS and {row.mean_truncated:.4g} after it."
            for row in cut
        ]
    return lines
