"""A token more or less at an end of the prompt: a BOS, the end token of the turn before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...hypotheses.evidence import Evidence
from ...hypotheses.other_prompts import with_prompts
from ...hypotheses.prediction import Prediction
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Each special token at each end, and the prompts without their first or last token."""
    tokenizer = evidence.scorer.tokenizer
    special = tokenizer.special_ids
    for token in special:
        shown = tokenizer.pieces([token])[0]
        yield from with_prompts(
            evidence,
            f"the sampler's prompts begin with {shown}, which the log lacks",
            lambda x, t=token: (t, *x.prompt_ids),
        )
        yield from with_prompts(
            evidence,
            f"the sampler's prompts end with {shown}, which the log lacks",
            lambda x, t=token: (*x.prompt_ids, t),
        )
    yield from with_prompts(
        evidence,
        "the log's prompts have a first token that the sampler did not read",
        lambda x: x.prompt_ids[1:],
    )
    yield from with_prompts(
        evidence,
        "the log's prompts have a last token that the sampler did not read",
        lambda x: x.prompt_ids[:-1],
    )


def a_bos_that_the_log_lacks(w: World) -> Log:
    """An engine that adds a BOS to what it is given."""
    drawn = w.draw(w.bf16, [[w.bos_id, *p] for p in w.prompts], 3, w.usual, w.seed)
    return w.log(w.both([replace(x, prompt=x.prompt[1:]) for x in drawn]))


FAULT = Predicted(
    name="a special token",
    order=400,
    predict=predict,
    remedy="Hand the sampler's own token ids to the trainer; apply the chat template once.",
    tries="a BOS or end token more or less at an end of the prompt",
    is_late=True,
    plants=(Plant(group="ids", make=a_bos_that_the_log_lacks),),
)
