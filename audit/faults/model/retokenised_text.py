"""The ids of the text once it was decoded and encoded again."""

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
    """Of the prompts, and of the completions."""
    tokenizer = evidence.scorer.tokenizer
    yield from with_prompts(
        evidence,
        "the sampler read the prompt's text encoded again, which gives other ids",
        lambda x: tuple(tokenizer.round_trip(x.prompt_ids)),
    )
    pairs = {}
    for i, line in enumerate(evidence.lines):
        again = tuple(tokenizer.round_trip(line.completion_ids))
        if again != line.completion_ids and len(again) == len(line.completion_ids):
            pairs[i] = (line.prompt_ids, again)
    if pairs:
        scores = evidence.scorer.score(list(pairs.values()), [evidence.params()[i] for i in pairs])
        what = "the numbers are of the completion's text encoded again, which gives other ids"
        yield Prediction(what, dict(zip(pairs, scores, strict=True)))


def prompts_sent_as_text(w: World) -> Log:
    """Prompts whose ids are no longer those of their text, as after an edit; the engine is sent the text."""
    broken = [w.split_token(p) for p in w.prompts]
    texts = [w.tokenizer.decode(p) for p in broken]
    read = [w.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    drawn = w.draw(w.bf16, read, 3, w.usual, w.seed)
    prompts = [p for p in broken for _ in range(3)]
    return w.log(w.both([replace(x, prompt=p) for x, p in zip(drawn, prompts, strict=True)]))


FAULT = Predicted(
    name="retokenised text",
    order=440,
    predict=predict,
    remedy="Hand token ids from the sampler to the trainer; never decode and encode again.",
    tries="ids decoded and encoded again",
    is_late=True,
    plants=(Plant(group="ids", make=prompts_sent_as_text),),
)
