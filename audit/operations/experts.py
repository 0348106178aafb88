"""Where two engines choose other experts: the share of tokens and layers, and the first of them.

The experts of a token are the ones with the largest router logits, of equal logits those with the lower
index. Both engines' choices are taken from the logits that they computed, so an engine with another rule for
ties counts as choosing the same; its `experts` operation shows that rule (explain.py).
"""

from ...model.config import ModelConfig
from ...verify.trace import Trace
from ..sections import ExpertsDifference


def experts_difference(a: Trace, b: Trace, config: ModelConfig) -> ExpertsDifference | None:
    """The difference of two traces of one sequence; None where they show no router of the model."""
    places, differ = 0, 0
    first: tuple[int, int] | None = None
    for layer in sorted(config.experts.layers) if config.experts else ():
        name = f"layers.{layer}.router"
        if name not in a or name not in b or a[name].shape != b[name].shape:
            continue
        # A stable sort of falling logits puts the lower index first among equals.
        by_logit = [trace[name].sort(dim=1, descending=True, stable=True).indices for trace in (a, b)]
        chosen = [ids[:, : config.experts.per_token].sort(dim=1).values for ids in by_logit]
        parted = (chosen[0] != chosen[1]).any(1).nonzero().flatten().tolist()
        places, differ = places + len(chosen[0]), differ + len(parted)
        if parted and first is None:
            first = layer, parted[0]
    if not places:
        return None
    return ExpertsDifference(places, differ, *(first or (None, None)))
