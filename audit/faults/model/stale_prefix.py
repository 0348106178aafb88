"""Keys and values of the prompt by other weights, those of the completion by the model's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ....kernels.attention_plan import KEY_TILE
from ....model.cache import BlockCache, CachedContext
from ....model.decoder import Decoder
from ...hypotheses.evidence import Evidence
from ...hypotheses.prediction import Prediction
from ...hypotheses.scores import read_rows
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """The prompt is in the cache of each other checkpoint, but for its last token."""
    scorer = evidence.scorer
    for folder in scorer.checkpoints:
        older = scorer.decoder(folder)
        rows = [
            _after_prefix(older, scorer.model(), line.prompt_ids, line.pair[1]) for line in evidence.lines
        ]
        scores = read_rows(scorer.model(), rows, evidence.pairs(), evidence.params())
        what = f"the sampler's cache of the prompts was computed with the weights of {folder}"
        yield Prediction(what, evidence.by_line(scores))


@torch.no_grad()
def _after_prefix(older: Decoder, model: Decoder, prompt: tuple[int, ...], completion: tuple[int, ...]):
    """The rows [C, D] of a completion whose prompt, but for its last token, is in the cache of `older`."""
    inputs, first = [*prompt, *completion[:-1]], len(prompt) - 1
    sizes = {"slots": 1, "compute": model.dtype}
    cache = BlockCache(model.config, -(-len(inputs) // KEY_TILE), model.cache_dtype, model.device, **sizes)
    blocks = [cache.allocate(cache.blocks)]
    if first:
        context = CachedContext(cache, [first], [0], blocks, slots=[0])
        older.hidden(torch.tensor(inputs[:first]), context)
    rest = inputs[first:]
    return model.hidden(torch.tensor(rest), CachedContext(cache, [len(rest)], [first], blocks, slots=[0]))


def prefix_cache_not_reset(w: World) -> Log:
    """An engine that keeps its prefix cache over a sync; its new weights read it."""
    return w.sampler(w.bf16, prefix_of=w.model(w.old), options=w.with_old)


FAULT = Predicted(
    name="stale prefix cache",
    order=200,
    predict=predict,
    needs_decoder=True,
    remedy="Reset the prefix cache whenever the weights change.",
    tries="the prompts' keys and values by each model that `--checkpoints` names",
    known_from=("NVIDIA-NeMo/RL#4018",),
    plants=(Plant(group="weights", make=prefix_cache_not_reset),),
)
