"""A mixture of experts as one function of its weights, for the tests of the law."""

import torch
from zerokl.kernels.combine_experts import combine_experts
from zerokl.kernels.expert_rows import expert_rows
from zerokl.kernels.grouped_linear import grouped_linear
from zerokl.kernels.linear import linear
from zerokl.kernels.passes import ONE_SEQUENCE, Pass
from zerokl.kernels.silu_mul import silu_mul
from zerokl.kernels.topk_softmax import topk_softmax

from tests.helpers import randn

EXPERTS, CHOSEN, INNER = 6, 3, 24


def weights(D: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """The router [E, D], the matrices of gate and up [E 2I, D], and those of down [E D, I]."""
    shapes = (EXPERTS, D), (EXPERTS * 2 * INNER, D), (EXPERTS * D, INNER)
    return [randn(seed + i, *shape, dtype=dtype, scale=shape[1] ** -0.5) for i, shape in enumerate(shapes)]


def experts_of_logits(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    in_pass: Pass = ONE_SEQUENCE,
    renormalise: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output [T, D], the routing weights [T, k] and the experts [T, k] of x [T, D], logits [T, E]."""
    q, ids = topk_softmax(logits, CHOSEN, renormalise)
    rows = expert_rows(ids, logits.shape[1], x)
    h = silu_mul(grouped_linear(x, gate_up, rows, in_pass))
    return combine_experts(h, down, q, rows, in_pass), q, ids


def mixture(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    in_pass: Pass = ONE_SEQUENCE,
    renormalise: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of experts_of_logits for the logits of a router [E, D]."""
    return experts_of_logits(x, linear(x, router, None, in_pass), gate_up, down, in_pass, renormalise)
