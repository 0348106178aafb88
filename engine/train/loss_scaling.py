"""Scaling of the loss, which keeps fp16 gradients representable.

    g = (d scale loss / d w) / scale          scale = 2^k

fp16 reaches from 2^-24 to 65504. The scale multiplies the loss. Every gradient of an activation that is
rounded to fp16 is therefore `scale` times as large. The gradient of a weight is summed in fp32 and divided by
the scale, which is exact.

A power of two changes no significand. So the weights after an update do not depend on the scale, unless a
gradient overflows or underflows. An overflow makes a gradient infinite, and the update is skipped. An
underflow makes a gradient smaller than 2^-14, where fp16 has fewer bits, or than 2^-24, where it has none. In
fp16 some gradients underflow at every scale that was measured: docs/fp16-loss-scales.md.

Dynamic scaling (Micikevicius et al., "Mixed precision training", arXiv:1710.03740, section 3.2) multiplies
the scale by `backoff` at an overflow, and doubles it after `growth_interval` updates without an overflow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config.precision_section import PrecisionConfig
from .optimizer import GradientOverflowError, Optimizer
from .scored import Scored
from .underflow import WATCHED

# The run ends at this many overflows in a row. With the default backoff of 1/2 the scale has then fallen to
# about 2^-10 of what it was, so the scale is not the reason.
IN_A_ROW = 10


@dataclass(frozen=True)
class Update:
    """The outcome of an update: whether it was applied, and its metrics.

    notes: the weight whose gradient overflowed, where the update was not applied; what LoRA's layers lose.
    """

    applied: bool
    metrics: dict[str, float]
    notes: dict[str, Any] = field(default_factory=dict)


class LossScaler:
    """The scale of the loss."""

    def __init__(self, cfg: PrecisionConfig, dtype: torch.dtype):
        self.cfg = cfg
        self.kind = cfg.scaling if cfg.scaling != "auto" else ("dynamic" if dtype == torch.float16 else "off")
        self.scale = 1.0 if self.kind == "off" else cfg.scale
        self.clean = self.in_a_row = 0

    @property
    def state(self) -> dict[str, float]:
        """The whole state: the scale, the updates since it last changed, and the overflows in a row."""
        return {"scale": self.scale, "clean": self.clean, "in_a_row": self.in_a_row}

    def load(self, state: Mapping[str, float]) -> None:
        """Take over a state."""
        self.scale, self.clean, self.in_a_row = state["scale"], state["clean"], state["in_a_row"]

    @property
    def on(self) -> bool:
        """Whether the loss is scaled. A scale of 1 counts as well."""
        return self.kind != "off"

    def update(
        self, optimizer: Optimizer, gradient: torch.Tensor | None, parts: Sequence[Scored] = ()
    ) -> Update:
        """Update the weights from the gradient of the scaled loss.

        parts: what the micro-batches of this gradient left behind. A gradient that is not finite reaches
        neither weights nor optimizer state. It raises GradientOverflowError, a FloatingPointError, where the
        loss is not scaled, or at the last of IN_A_ROW overflows in a row.
        """
        scale = self.scale
        try:
            metrics = optimizer.update(gradient, scale)
        except GradientOverflowError as error:
            if not self.on:
                raise
            return self._overflow(error, optimizer)
        swallowed, notes = _swallowed(optimizer)
        metrics |= swallowed
        self.in_a_row, self.clean = 0, self.clean + 1
        if self.kind == "dynamic" and self.clean >= self.cfg.growth_interval:
            self.scale, self.clean = min(scale * 2.0, self.cfg.maximum), 0
        if not self.on:
            return Update(True, metrics, notes)
        lost = {
            f"scaling/underflow_{name}": float(sum(part.underflow.get(name, 0) for part in parts))
            for name in WATCHED
        }
        return Update(True, metrics | lost | {"scaling/scale": scale, "scaling/skipped": 0.0}, notes)

    def _overflow(self, error: GradientOverflowError, optimizer: Optimizer) -> Update:
        scale, self.clean, self.in_a_row = self.scale, 0, self.in_a_row + 1
        if self.in_a_row == IN_A_ROW:
            raise GradientOverflowError(
                error.weight,
                f"{IN_A_ROW} updates in a row overflowed, the last at loss scale {scale:g} in the gradient "
                f"of {error.weight}; lower precision.scale or optimizer.lr, or use another dtype",
            ) from None
        if self.kind == "dynamic":
            self.scale = max(scale * self.cfg.backoff, self.cfg.minimum)
        metrics = {
            "grad_norm": math.nan,
            "lr": optimizer.learning_rate(),
            "scaling/scale": scale,
            "scaling/skipped": 1.0,
        }
        return Update(False, metrics, {"scaling/overflow": error.weight})


def _swallowed(optimizer: Optimizer) -> tuple[dict[str, float], dict[str, Any]]:
    """The share of LoRA's adapters that rounding swallows, and a note with that of each layer.

    Both are empty without LoRA. An adapter that is zero has lost nothing.
    """
    by_layer = optimizer.weights.swallowed()
    if not by_layer:
        return {}, {}
    lost, whole = map(math.fsum, zip(*by_layer.values(), strict=True))
    shares = {str(layer): lost / whole if whole else 0.0 for layer, (lost, whole) in by_layer.items()}
    return {"lora/swallowed": lost / whole if whole else 0.0}, {"lora/layers": shares}
