"""The layers before the first one that is turned: they give what they gave before, and compute nothing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..engines.module_trace import first_tensor
from .knob import Turn, computing
from .module_places import layers_of

# Bytes of the layers' outputs that are kept at most.
_MOST_BYTES = 1 << 29


@dataclass(frozen=True)
class Prefix:
    """Layers of a model, and what each gave in a forward without knobs. No layers: none can be left out."""

    layers: Sequence[torch.nn.Module] = ()
    outputs: Sequence[Any] = ()

    @contextmanager
    def before(self, turns: Sequence[Turn]) -> Iterator[None]:
        """Inside this context the layers before the first one of some turns compute nothing."""
        with self._without(min((layer for turn in turns for layer in turn.layers), default=0)):
            yield

    @contextmanager
    def _without(self, first: int) -> Iterator[None]:
        with ExitStack() as stack:
            for layer, out in zip(self.layers[: max(first, 0)], self.outputs, strict=False):
                stack.enter_context(computing(layer, lambda *_args, out=out, **_kwargs: out))
            yield


def recorded(model: torch.nn.Module, scores: Callable[[], np.ndarray]) -> tuple[np.ndarray, Prefix]:
    """What `scores` gives, and the prefix of its forward.

    A family whose later layers read more than the one before gave (shared keys, say) would have other scores
    without the first half of its layers. It has no prefix.
    """
    layers, outputs = layers_of(model), []
    hooks = [x.register_forward_hook(lambda _m, _i, out: outputs.append(out)) for x in layers]
    try:
        base = scores()
    finally:
        for hook in hooks:
            hook.remove()
    prefix = Prefix(layers, outputs)
    if len(outputs) != len(layers) or not layers or sum(map(_bytes, outputs)) > _MOST_BYTES:
        return base, Prefix()
    with prefix._without(len(layers) // 2):
        again = scores()
    return base, prefix if np.array_equal(base, again, equal_nan=True) else Prefix()


def _bytes(out: Any) -> int:
    """The bytes of a layer's output."""
    return (out if isinstance(out, torch.Tensor) else first_tensor(out)).nbytes
