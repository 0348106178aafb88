"""One kind of tensors of another checkpoint, all others of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ...hypotheses.evidence import Evidence
from ...hypotheses.other_weights import with_weights
from ...hypotheses.prediction import Prediction
from ...hypotheses.scores import decoder_scores
from ..fault import Plant, Predicted

if TYPE_CHECKING:
    from ..planting.world import Log, World


# Kinds of tensors that a sync may leave out, by a part of their names.
_KINDS = {
    "the embedding and lm_head": ("embed_tokens", "lm_head"),
    "the norms": ("norm",),
    "the attention's projections": ("self_attn",),
    "the MLP's projections": (".mlp.",),
    "the biases": (".bias",),
}


def predict(evidence: Evidence) -> Iterator[Prediction]:
    """Each kind, of each checkpoint that was named."""
    scorer = evidence.scorer
    model = scorer.model()
    for folder in scorer.checkpoints:
        older = model.layout.checkpoint_views(scorer.decoder(folder).flat.detach())
        for kind, parts in _KINDS.items():
            flat = model.flat.detach().clone()
            views = model.layout.checkpoint_views(flat)
            left_out = [name for name in views if any(part in name for part in parts)]
            if all(torch.equal(views[name], older[name]) for name in left_out):
                continue
            for name in left_out:
                views[name].copy_(older[name])
            what = f"{kind} in the sampler are of {folder}, all other tensors are the model's"
            yield Prediction(what, decoder_scores(with_weights(evidence, flat), evidence))


def norms_left_out_of_a_sync(w: World) -> Log:
    """A sync of matrices alone."""
    old = w.parameters(w.old)
    return w.sampler(w.changed(lambda name, _: old[name] if "norm" in name else None), options=w.with_old)


def attention_left_out_of_a_sync(w: World) -> Log:
    """A sync whose names of fused projections did not fit."""
    old = w.parameters(w.old)
    model = w.changed(lambda name, _: old[name] if "self_attn" in name else None)
    return w.sampler(model, options=w.with_old)


FAULT = Predicted(
    name="incomplete sync",
    order=220,
    predict=predict,
    needs_decoder=True,
    remedy="The sync left these tensors out, or the engine dropped them: hash both sides (zerokl weights).",
    tries="one kind of tensors of a model that `--checkpoints` names, all others of the model",
    known_from=("huggingface/trl#5312",),
    plants=(
        Plant(group="weights", make=norms_left_out_of_a_sync),
        Plant(group="weights", make=attention_left_out_of_a_sync),
    ),
)
