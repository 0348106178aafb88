"""Padding between prompt and completion: masked out, but counted in the positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...hypotheses.evidence import Evidence
from ...hypotheses.other_prompts import padded_lengths, positions_with_gap
from ...hypotheses.prediction import Prediction
from ...hypotheses.scores import decoder_scores
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """To the longest prompt of the log or of a batch, and to usual lengths."""
    scorer = evidence.scorer
    if not scorer.takes_positions:
        return
    most = scorer.model().config.max_positions
    for words, length in padded_lengths(evidence):
        gaps = [length(line) - len(line.prompt_ids) for line in evidence.lines]
        longest = max(
            g + len(x.prompt_ids) + len(x.completion_ids) for g, x in zip(gaps, evidence.lines, strict=True)
        )
        if any(gaps) and longest <= most:
            positions = [
                positions_with_gap(line, gap) for line, gap in zip(evidence.lines, gaps, strict=True)
            ]
            what = f"the positions of the completion count padding after prompts that are padded to {words}"
            yield Prediction(what, decoder_scores(scorer.model(), evidence, positions))


def positions_count_the_padding(w: World) -> Log:
    """Prompts are padded to one length on the right; the completion's positions go on after the padding."""
    longest = max(map(len, w.prompts))
    lines = []
    for i, prompt in enumerate(w.prompts):
        gap = longest - len(prompt)
        lines += w.draw(w.bf16, [prompt], 3, w.usual, w.seed + i, position_gap=gap)
    return w.log(w.both(lines))


FAULT = Predicted(
    name="positions shifted by padding",
    order=420,
    predict=predict,
    remedy="Give the forward position_ids that count real tokens (cumsum of the attention mask), and the "
    "attention mask itself.",
    tries="the same padding, masked out and counted in the positions",
    known_from=("huggingface/trl#6800",),
    is_late=True,
    plants=(Plant(group="attention", make=positions_count_the_padding, named=("positions",)),),
)
