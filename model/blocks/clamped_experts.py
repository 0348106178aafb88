"""The mixture of experts of gpt-oss: biases, clamped SwiGLU, and a choice by logits.

    logits = x router^T + bias;   ids = the k largest logits;   q = softmax of these k
    y = sum over the k experts of q (act(x gate_up + bias) down + bias)

The weights are as the checkpoints have them: those of all experts in one tensor, each matrix transposed, with
gate and up in turn, column by column. They have no LoRA adapters, as PEFT finds no module there.
Shapes: T tokens of packed sequences, D hidden size, E experts of the size I.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...kernels.clamped_swiglu import clamped_swiglu
from ...kernels.combine_experts import combine_experts
from ...kernels.expert_rows import Rows
from ...kernels.given_softmax import given_softmax
from ...kernels.grouped_linear import grouped_linear
from ...kernels.passes import Pass
from ...kernels.topk_softmax import topk_of_logits
from ..numerics import Numerics
from ..operation import Operation, Site
from ..routing import Routing
from ..sizes import Sizes
from .block import LayerWeights, Weight
from .experts import LOGITS_BIAS, MixtureOfExperts

ROUTER, EXPERTS = "mlp.router", "mlp.experts"


@dataclass(frozen=True)
class ClampedExperts(MixtureOfExperts):
    """A router with a bias, and experts with biases. alpha, limit: see kernels/clamped_swiglu.py."""

    alpha: float = 1.702
    limit: float = 7.0

    @property
    def values(self) -> dict[str, Any]:
        return super().values | {"swiglu_alpha": self.alpha, "swiglu_limit": self.limit}

    def weights(self, c: Sizes) -> Iterator[Weight]:
        """router [E, D], its bias [E]; gate_up [E, D, 2 I] and down [E, I, D], and their biases."""
        D, (E, I) = c.hidden_size, (self.experts.number, self.experts.size)
        yield Weight("router", (D,), ((f"{ROUTER}.weight", E),))
        yield Weight(LOGITS_BIAS, (), ((f"{ROUTER}.bias", E),))
        E //= c.expert_ranks
        for name, inputs, outputs in (("gate_up", D, 2 * I), ("down", I, D)):
            stored = f"{EXPERTS}.{name}_proj"
            yield Weight(f"experts.{name}", (inputs, outputs), ((stored, E),), packable=False, by_expert=True)
            bias = f"experts.{name}_bias", (outputs,), ((f"{stored}_bias", E),)
            yield Weight(*bias, packable=False, by_expert=True)

    def dtypes(self, numerics: Numerics, compute: torch.dtype) -> dict[str, torch.dtype | None]:
        return dict.fromkeys(("router", LOGITS_BIAS), self._logits_dtype(numerics, compute))

    def operations(self, c: Sizes, x: str) -> tuple[Operation, ...]:
        router, experts = super().operations(c, x)
        place = Site(ROUTER)
        return replace(router, transformers=place, vllm=place, weight=ROUTER), experts

    def _route(
        self, logits: torch.Tensor, w: LayerWeights, i: int, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = routing.experts(i, logits, topk_of_logits(logits, self.experts.per_token))
        return given_softmax(logits, ids, True), ids

    def _weighted(
        self, x: torch.Tensor, q: torch.Tensor, w: LayerWeights, rows: Rows, in_pass: Pass
    ) -> torch.Tensor:
        gate_up = grouped_linear(x, w["experts.gate_up"], rows, in_pass, w["experts.gate_up_bias"])
        h = clamped_swiglu(gate_up, self.alpha, self.limit)
        return combine_experts(h, w["experts.down"], q, rows, in_pass, w["experts.down_bias"])
