"""The completion's positions begin again at 0, or leave some out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...hypotheses.evidence import Evidence
from ...hypotheses.other_prompts import positions_with_gap
from ...hypotheses.prediction import Prediction
from ...hypotheses.scores import decoder_scores
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


# Gaps before the completion's positions.
_GAPS = range(2, 17)


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """From 0, one too low, and 1 to 16 too high."""
    scorer = evidence.scorer
    if not scorer.takes_positions:
        return
    for what, gap in (
        ("the positions of the completion begin again at 0", lambda line: -len(line.prompt_ids)),
        ("the positions of the completion are one too high", lambda line: 1),
        ("the positions of the completion are one too low", lambda line: -1),
        *((f"the positions of the completion are {n} too high", lambda line, n=n: n) for n in _GAPS),
    ):
        positions = [positions_with_gap(line, gap(line)) for line in evidence.lines]
        if max(p.max() for p in positions) < scorer.model().config.max_positions:
            yield Prediction(what, decoder_scores(scorer.model(), evidence, positions))


def a_gap_in_positions(w: World) -> Log:
    """An engine that counts tokens which are not there."""
    return w.sampler(position_gap=int(w.rng.integers(3, 12)))


FAULT = Predicted(
    name="other positions",
    order=430,
    predict=predict,
    remedy="Give the forward position_ids that count real tokens (cumsum of the attention mask), and the "
    "attention mask itself.",
    tries="the completion's positions from 0 on, one too low, and 1 to 16 too high",
    is_late=True,
    plants=(Plant(group="attention", make=a_gap_in_positions, named=("positions",)),),
)
