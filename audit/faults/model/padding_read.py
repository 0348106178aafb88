"""Padding before the prompt that attention did not mask out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...hypotheses.evidence import Evidence
from ...hypotheses.other_prompts import padded_lengths, with_prompts
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """To the longest prompt of the log or of a batch, and to usual lengths."""
    for token in evidence.scorer.tokenizer.padding_ids:
        for words, length in padded_lengths(evidence):
            yield from with_prompts(
                evidence,
                f"attention reads the padding (token {token}) before prompts that are padded to {words}",
                lambda x, t=token, n=length: (t,) * (n(x) - len(x.prompt_ids)) + x.prompt_ids,
            )


def padding_is_read(w: World) -> Log:
    """The sampler pads its prompts on the left, and attends to the padding."""
    longest = max(map(len, w.prompts))
    padded = [[w.padding_id] * (longest - len(p)) + p for p in w.prompts]
    lines = w.draw(w.bf16, padded, 3, w.usual, w.seed)
    prompts = [p for p in w.prompts for _ in range(3)]
    return w.log(w.both([replace(x, prompt=p) for x, p in zip(lines, prompts, strict=True)]))


FAULT = Predicted(
    name="padding is read",
    order=410,
    predict=predict,
    remedy="Give the forward position_ids that count real tokens (cumsum of the attention mask), and the "
    "attention mask itself.",
    tries="padding to the longest prompt of the log or of each batch of 2 to 64 lines, and to usual lengths",
    is_late=True,
    plants=(Plant(group="lines", make=padding_is_read),),
)
