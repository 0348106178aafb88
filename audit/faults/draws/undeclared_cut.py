"""A top-p, top-k or min-p that tokens were drawn with, and that no column has.

Neither column shows it: both are of the whole distribution, and equal. The drawn tokens do. Without the cut
some of them would lie beyond it, at each place with the mass m that is beyond, and

    evidence = -sum log(1 - m)      nats, where none of the tokens lies beyond the cut

Shapes: C completion tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ....kernels.sampling_params import SamplingParams
from ....kernels.truncation import scaled_logits
from ...hypotheses.judgement import EVIDENCE
from ...hypotheses.logits import Rows
from ..fault import Plant, Shown

if TYPE_CHECKING:
    from ..planting.world import Log, World


# The cuts that are looked for. A cut is told from the next one by what is drawn between the two.
_CUTS = {
    "top-p": 1.0 - np.geomspace(0.005, 0.6, 24),
    "top-k": np.array([1, 2, 3, 5, 8, 10, 15, 20, 25, 30, 40, 50, 64, 100, 200, 500]),
    "min-p": np.geomspace(0.002, 0.5, 24),
}
# Standard errors by which the drawn tokens may be likelier or less
# likely than those of the cut distribution are: a lower temperature is no cut.
_ERRORS = 4.0


def look(rows: Rows) -> str | None:
    """The cut that the drawn tokens show best; None where they show none."""
    lines = rows.evidence.lines
    drawn = [i for i in rows.logits if (lines[i].params or SamplingParams()).temperature > 0.0]
    distributions = []
    for i in drawn:
        known = torch.from_numpy(~np.isnan(lines[i].logged))
        logits = scaled_logits(rows.logits[i], lines[i].params or SamplingParams())
        ids = torch.tensor(lines[i].completion_ids)
        distributions.append(_sorted(logits[known], ids[known]))
    best = max((x for name in _CUTS if (x := _best(name, distributions))), default=None)
    if not best or best[0] < EVIDENCE + math.log(sum(map(len, _CUTS.values()))):
        return None
    evidence, name, value, beyond, tokens = best
    return (
        f"the tokens were drawn with a {name} of about {value:.3g}, which neither the log nor its "
        f"columns have: none of {tokens:,} tokens lies beyond it, where the columns expect {beyond:.0f} "
        f"({evidence:.0f} nats of evidence)."
    )


Sorted = tuple[torch.Tensor, torch.Tensor]  # p [C, V] fp64, the largest first, and the drawn rank [C]


def _sorted(logits: torch.Tensor, ids: torch.Tensor) -> Sorted:
    p, order = torch.softmax(logits.double(), 1).sort(dim=1, descending=True, stable=True)
    return p, (order == ids.unsqueeze(1)).double().argmax(1)


def _best(name: str, lines: Sequence[Sorted]) -> tuple[float, str, float, float, int] | None:
    """The tightest cut of a kind beyond which no drawn token lies.

    Returns its evidence, name and size, the tokens that are expected beyond it, and all tokens.
    """
    p_of = [p for p, _ in lines]
    sizes = [_size(name, p) for p in p_of]
    drawn = [s.gather(1, rank.unsqueeze(1)).squeeze(1) for s, (_, rank) in zip(sizes, lines, strict=True)]
    if not (count := sum(map(len, drawn))):
        return None
    largest = max(float(x.max()) for x in drawn if len(x))
    allowed = [x for x in _CUTS[name] if largest < _bound(name, float(x))]
    if not allowed:
        return None
    value = float(min(allowed, key=lambda x: _bound(name, float(x))))
    evidence = beyond = excess = variance = 0.0
    for (p, rank), size in zip(lines, sizes, strict=True):
        kept = p * (size < _bound(name, value))
        mass = kept.sum(1)
        evidence, beyond = evidence - float(mass.log().sum()), beyond + float((1.0 - mass).sum())
        logp = p.clamp_min(1e-300).log()
        expected = (kept * logp).sum(1) / mass
        excess += float((logp.gather(1, rank.unsqueeze(1)).squeeze(1) - expected).sum())
        variance += float(((kept * logp.square()).sum(1) / mass - expected.square()).sum())
    if abs(excess) > _ERRORS * math.sqrt(max(variance, 0.0)) + 1e-6 * count:
        return None
    return evidence, name, value, beyond, count


def _size(name: str, p: torch.Tensor) -> torch.Tensor:
    """What a cut of a kind bounds of each token, [C, V], rising with the rank. p: the largest first."""
    if name == "top-p":
        return p.cumsum(1) - p
    return torch.arange(p.shape[1]).expand_as(p) if name == "top-k" else 1.0 - p / p[:, :1]


def _bound(name: str, value: float) -> float:
    return 1.0 - value if name == "min-p" else value


def cut_that_no_column_has(w: World) -> Log:
    """A sampler that draws with top-k and reports the whole distribution, which the trainer has as well."""
    return w.log(w.both(w.drawn(replace(w.usual, top_k=20), reported=w.usual)))


FAULT = Shown(
    name="drawn with a cut that is not declared",
    order=20,
    look=look,
    remedy="Let the sampler report processed log-probabilities (vLLM: "
    "logprobs_mode='processed_logprobs'), write top_p, top_k and min_p into the log, and cut in the "
    "trainer alike; or draw without the cut.",
    tries="a top-p, top-k or min-p that neither column has, and beyond which no token was drawn",
    plants=(Plant(group="ids", make=cut_that_no_column_has),),
)
