"""The router of a mixture of experts whose experts are given: their weights, from its own logits.

    p = softmax(z);   w_j = p_j of the given experts, or p_j / sum of these p

The gradient, the shapes and the roundings are those of topk_softmax.py. The given p are added in the order of
the slots. So given experts that the router would choose itself have the bits of topk_softmax.
Source: routing replay, arXiv 2510.11370.
"""

import torch

from .backend import on_triton
from .grad import check_dtype
from .topk_softmax import topk_softmax_backward, topk_softmax_ref


def given_softmax_ref(
    logits_TE: torch.Tensor, ids_Tk: torch.Tensor, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward only: the weights [T, k], and all probabilities [T, E]."""
    _, _, p = topk_softmax_ref(logits_TE, 1, False)
    w = p.gather(1, ids_Tk)
    if renormalise:
        total, *rest = w.unbind(1)
        for p_j in rest:
            total = total + p_j
        w = w * torch.where(total > 0.0, 1.0 / total, 1.0).unsqueeze(1)
    return w, p


def _forward(logits: torch.Tensor, ids: torch.Tensor, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if not on_triton(logits):
        return given_softmax_ref(logits, ids, renormalise)
    from .given_softmax_triton import given_softmax_fwd

    return given_softmax_fwd(logits, ids, renormalise)


class _GivenSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids, renormalise):
        w, p = _forward(logits, ids, renormalise)
        ctx.save_for_backward(w, ids, p)
        ctx.renormalise, ctx.dtype = renormalise, logits.dtype
        return w

    @staticmethod
    def backward(ctx, dw):
        return topk_softmax_backward(dw, *ctx.saved_tensors, ctx.renormalise, ctx.dtype), None, None


def given_softmax(logits: torch.Tensor, ids: torch.Tensor, renormalise: bool) -> torch.Tensor:
    """The weights [T, k] of the given experts, in fp32 (fp64 for fp64), differentiable in the logits.

    logits [T, E]; ids [T, k] int64, a token's experts, each once. renormalise: see topk_softmax. Raises
    ValueError on a bad shape or dtype, and for an expert outside 0..E - 1, if the ids are on the CPU: nobody
    waits for a GPU.
    """
    check_dtype("given_softmax", logits=logits)
    if logits.dim() != 2 or ids.dim() != 2 or len(ids) != len(logits) or ids.dtype != torch.int64:
        raise ValueError(
            f"given_softmax: logits {tuple(logits.shape)} must be [T, E], and ids {tuple(ids.shape)} in "
            f"{ids.dtype} [T, k] in int64"
        )
    if (
        ids.numel()
        and ids.device.type == "cpu"
        and not 0 <= int(ids.min()) <= int(ids.max()) < logits.shape[1]
    ):
        raise ValueError(f"given_softmax: ids must be in 0..{logits.shape[1] - 1}, the router's experts")
    return _GivenSoftmax.apply(logits, ids, renormalise)
