"""The mixture of experts of a sparse layer (Qwen3-MoE).

    logits = x router^T;   q, ids = top-k of softmax(logits);   y = sum over the k experts of q mlp(x)

Shapes: T tokens of packed sequences, D hidden size, E experts.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..kernels.combine_experts import combine_experts
from ..kernels.expert_rows import expert_rows
from ..kernels.given_softmax import given_softmax
from ..kernels.grouped_linear import grouped_linear
from ..kernels.linear import linear
from ..kernels.passes import Pass
from ..kernels.silu_mul import silu_mul
from ..kernels.tile_tables import TileTable
from ..kernels.topk_softmax import topk_softmax
from .config import Experts
from .weights import LayerWeights


def run_experts(
    c: Experts,
    w: LayerWeights,
    x: torch.Tensor,
    in_pass: Pass,
    tiles: TileTable,
    router_dtype: torch.dtype | None,
    hook: Callable[[str, torch.Tensor], None],
    route: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """x [T, D] -> [T, D]. hook: called with the name in the layer and the output of each operation.
    route: is told the logits [T, E] and the chosen experts [T, k], and returns those that compute
        (Routing.experts).

    The router's logits are in router_dtype, or in the dtype of x where that is None, and the routing weights
    in fp32.
    """
    logits = _router_logits(x, w["router"], in_pass, tiles, router_dtype or x.dtype)
    hook("router", logits)
    q, ids = topk_softmax(logits, c.per_token, c.renormalise)
    given = route(logits, ids)
    if given is not ids:
        q, ids = given_softmax(logits, given, c.renormalise), given
    rows = expert_rows(ids, c.number, x)
    h = silu_mul(grouped_linear(x, w["experts.gate_up"], rows, in_pass))
    y = combine_experts(h, w["experts.down"], q, rows, in_pass)
    hook("experts", y)
    return y


def _router_logits(
    x: torch.Tensor, w: torch.Tensor, in_pass: Pass, tiles: TileTable, dtype: torch.dtype
) -> torch.Tensor:
    """x [T, D], w [E, D] -> logits [T, E] in `dtype`. The gradient of a converted weight has w's buffer."""
    if dtype == w.dtype:  # a source of weights may have it in this dtype
        return linear(x.to(dtype), w, None, in_pass, tiles)
    wide, buffer = w.to(dtype), in_pass.buffers.get(w)
    if buffer is not None:
        wide = w.detach().to(dtype).requires_grad_()
        in_pass = replace(in_pass, buffers={wide: buffer})
    return linear(x.to(dtype), wide, None, in_pass, tiles)
