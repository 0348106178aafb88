"""Where two sides choose other experts: the share of tokens and layers, and the first of them.

In a trace, the experts of a token are the ones with the largest router logits, of equal logits those with the
lower index. Both engines' choices are taken from the logits that they computed, so an engine with another
rule for ties counts as choosing the same; its `experts` operation shows that rule (explain.py). A log names
the experts themselves.

Shapes: T rows of a sequence, P tokens of its prompt, C of its completion; k experts of a token.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...model.config import ModelConfig
from ...model.context import PackedContext
from ...model.decoder import Decoder
from ...model.routing import RecordedRouting
from ...verify.operation_outputs import Trace
from ..engines.engine import Pair
from ..formats.record import LoggedRollout
from ..hypotheses.hf_forward import HfForward
from ..sections import ExpertsDifference
from .plain_operations import Checkpoint, choice_scores


def experts_difference(a: Trace, b: Trace, checkpoint: Checkpoint) -> ExpertsDifference | None:
    """The difference of two traces of one sequence; None where they show no router of the model."""
    places, differ, config = 0, 0, checkpoint.config
    first: tuple[int, int] | None = None
    for layer in sorted(config.experts.layers) if config.experts else ():
        name = f"layers.{layer}.router"
        if name not in a or name not in b or a[name].shape != b[name].shape:
            continue
        # A stable sort of falling logits puts the lower index first among equals.
        scores = [choice_scores(name, _monotone(trace[name], config), checkpoint) for trace in (a, b)]
        ids = [x.sort(dim=1, descending=True, stable=True).indices for x in scores]
        chosen = [x[:, : config.experts.per_token].sort(dim=1).values for x in ids]
        parted = (chosen[0] != chosen[1]).any(1).nonzero().flatten().tolist()
        places, differ = places + len(chosen[0]), differ + len(parted)
        if parted and first is None:
            first = layer, parted[0]
    if not places:
        return None
    return ExpertsDifference(places, differ, *(first or (None, None)))


def _monotone(logits: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """What a softmax router's probabilities are sorted as; of a sigmoid router the scores themselves."""
    return torch.sigmoid(logits.float()) if config.experts.sigmoid else logits


@torch.no_grad()
def experts_of_log(
    lines: Sequence[LoggedRollout], pairs: Sequence[Pair], decoder: Decoder | HfForward
) -> ExpertsDifference | None:
    """The difference of the experts that a log names and those of the decoder; None where there are none.

    pairs: prompt and completion of each line. Raises ValueError for experts of other layers or of another
    number than the model has.
    """
    if decoder.config.experts is None:
        return None
    layers, places, differ = sorted(decoder.config.experts.layers), 0, 0
    first: tuple[int, int, int] | None = None
    for i, (line, (prompt, completion)) in enumerate(zip(lines, pairs, strict=True)):
        if line.routed_experts is None:
            continue
        ids, routing = [*prompt, *completion[:-1]], RecordedRouting(decoder.config.experts)
        decoder.hidden(torch.tensor(ids), PackedContext([len(ids)], decoder.config, routing=routing))
        ours, logged = routing.taken().cpu().numpy(), _of_layers(line.routed_experts, decoder)
        completion_alone = len(logged) == len(completion)
        ours, logged = (ours[len(prompt) - 1 :], logged) if completion_alone else (ours, logged[: len(ids)])
        parted = (np.sort(ours, axis=2) != np.sort(logged, axis=2)).any(axis=2)  # [T, layers]
        places, differ = places + parted.size, differ + int(parted.sum())
        if first is None and parted.any():
            layer, row = (int(x) for x in np.argwhere(parted.T)[0])
            first = layers[layer], row + (len(prompt) - 1 if completion_alone else 0), i
    return ExpertsDifference(places, differ, *(first or (None, None, None))) if places else None


def _of_layers(experts: np.ndarray, decoder: Decoder) -> np.ndarray:
    """Those of the layers with experts. An engine may name all layers, the dense ones with any ids."""
    c = decoder.config
    if experts.shape[1] == c.layers:
        experts = experts[:, sorted(c.experts.layers)]
    if experts.shape[1:] != (len(c.experts.layers), c.experts.per_token):
        raise ValueError(
            f"log: routed_experts has {experts.shape[1]} layers and {experts.shape[2]} experts of a token; "
            f"the model has {len(c.experts.layers)} layers with experts, of {c.layers}, and "
            f"{c.experts.per_token} experts of a token"
        )
    return experts
