"""The router of a mixture of experts: the experts of each token and their weights.

    p = softmax(z);   the k experts with the largest p;   w_j = p_j, or p_j / sum of the chosen p

Gradient, with s = sum over the chosen of dw_j w_j:

    w_j = p_j:           dz_e = p_e (dw_e - s), where dw_e is 0 for an expert that was not chosen
    renormalised:        dz_j = w_j (dw_j - s) of a chosen expert, 0 of any other: its p cancels out

Shapes: z [T, E] router logits; w [T, k] fp32 (fp64 for fp64); ids [T, k] int64, by falling p. T tokens, E
experts, k experts of a token.
Roundings: p = exp(z - max) in fp32 is multiplied by the reciprocal of its sum, and so is w when it is
renormalised: three roundings each. dz is rounded once.
Order: as in vLLM's topk_softmax_kernels.cu. A lane adds its numbers one after another, and a tree adds the
lanes. A lane has the numbers that 16 bytes of logits hold, and more where 32 lanes are too few. So the order
depends on E and on the dtype of the logits. vLLM has other orders where E is no power of two; here such an E
is padded to one with terms of 0. The chosen p are added by falling p.
Of equal p the expert with the lower index comes first.
Not finite: with a logit that is NaN or +inf all p and all w of the token are NaN, and its experts are the
first ones. So its logprobs are NaN as well, and nothing hides it. vLLM's kernel takes such p as 0.
"""

from functools import reduce

import numpy as np
import torch

from .backend import on_triton
from .grad import accumulate_dtype, check_dtype
from .order import LOAD_BYTES, lanes_of, tree_sum


def topk_softmax_ref(
    logits_TE: torch.Tensor, k: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forward only: the weights [T, k], the ids [T, k], and all probabilities [T, E]."""
    z = logits_TE.to(accumulate_dtype(logits_TE.dtype))
    # A decode step has few tokens, and NumPy takes a third of the time for few numbers. Its roundings are
    # those of torch, except for exp.
    terms = torch.exp(z - z.amax(1, keepdim=True)).numpy()
    p = terms * (1.0 / _lane_sum(terms, LOAD_BYTES // logits_TE.itemsize))[:, None]
    # A stable sort keeps the lower index first among equals, and among NaN.
    ids = np.argsort(-p, axis=1, kind="stable")[:, :k]
    w = np.take_along_axis(p, ids, 1)
    if renormalise:
        w *= (1.0 / reduce(np.add, w.T))[:, None]
    return torch.from_numpy(w), torch.from_numpy(np.ascontiguousarray(ids)), torch.from_numpy(p)


def topk_softmax_bwd_ref(
    dw_Tk: torch.Tensor, w_Tk: torch.Tensor, ids_Tk: torch.Tensor, p_TE: torch.Tensor, renormalise: bool
) -> torch.Tensor:
    """The gradient of the logits, [T, E], in the dtype of the weights."""
    s = _slot_sum(dw_Tk * w_Tk).unsqueeze(1)
    zeros = torch.zeros_like(p_TE)
    if renormalise:
        return zeros.scatter_(1, ids_Tk, w_Tk * (dw_Tk - s))
    return p_TE * (zeros.scatter_(1, ids_Tk, dw_Tk) - s)


def topk_of_logits(logits_TE: torch.Tensor, k: int) -> torch.Tensor:
    """The ids [T, k] int64 of the largest logits [T, E], by falling logit; of equal ones the lower id first.

    In topk_softmax logits that differ may have equal p. given_softmax.py weighs what is chosen.
    """
    if on_triton(logits_TE):  # a sort of whole rows; + 0.0: a -0.0 is equal to 0.0
        z = logits_TE.detach().float() + 0.0
        return z.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()
    z = logits_TE.detach().to(accumulate_dtype(logits_TE.dtype)).numpy()
    return torch.from_numpy(np.ascontiguousarray(np.argsort(-z, axis=1, kind="stable")[:, :k]))


def topk_of_groups(logits_TE: torch.Tensor, k: int, groups: int, top_groups: int) -> torch.Tensor:
    """As topk_of_logits, of the experts in the groups with the largest logits; k of them must be there.

    groups: of equal size, one after another; top_groups: how many of them are taken, of equal ones the lower
    first. Source: DeepSeek-V2, arXiv:2405.04434, section 2.2.2.
    """
    if groups > 1:
        grouped = logits_TE.detach().unflatten(1, (groups, -1))
        best = topk_of_logits(grouped.amax(2), top_groups)
        others = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        logits_TE = grouped.masked_fill(others.unsqueeze(2), -torch.inf).flatten(1)
    return topk_of_logits(logits_TE, k)


def _lane_sum(terms_TE: np.ndarray, load: int) -> np.ndarray:
    """The sum of each row in the order of vLLM's kernel, [T]. load: see lanes_of."""
    T, E = terms_TE.shape
    loads, lanes, load = lanes_of(E, load)
    padded = loads * lanes * load
    x = np.pad(terms_TE, ((0, 0), (0, padded - E))) if padded > E else terms_TE
    x = x.reshape(T, loads, lanes, load)
    sums = reduce(np.add, (x[:, i // load, :, i % load] for i in range(loads * load)))
    return tree_sum(torch.from_numpy(sums), 1).numpy()


def _slot_sum(x_Tk: torch.Tensor) -> torch.Tensor:
    """The sum of each row, one number after another, [T]."""
    first, *rest = x_Tk.unbind(1)
    for x in rest:
        first = first + x
    return first


def _forward(
    logits: torch.Tensor, k: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not on_triton(logits):
        return topk_softmax_ref(logits, k, renormalise)
    from .topk_softmax_triton import topk_softmax_fwd

    return topk_softmax_fwd(logits, k, renormalise)


def topk_softmax_backward(
    dw_Tk: torch.Tensor,
    w_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    p_TE: torch.Tensor,
    renormalise: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of the logits, [T, E], rounded once to `dtype`."""
    if not on_triton(dw_Tk):
        return topk_softmax_bwd_ref(dw_Tk, w_Tk, ids_Tk, p_TE, renormalise).to(dtype)
    from .topk_softmax_triton import topk_softmax_bwd

    return topk_softmax_bwd(dw_Tk, w_Tk, ids_Tk, p_TE, renormalise, dtype)


class _TopkSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, k, renormalise):
        w, ids, p = _forward(logits, k, renormalise)
        ctx.save_for_backward(w, ids, p)
        ctx.renormalise, ctx.dtype = renormalise, logits.dtype
        ctx.mark_non_differentiable(ids)
        return w, ids

    @staticmethod
    def backward(ctx, dw, _):
        return topk_softmax_backward(dw, *ctx.saved_tensors, ctx.renormalise, ctx.dtype), None, None


def topk_softmax(logits: torch.Tensor, k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights [T, k], in fp32 (fp64 for fp64), and the ids [T, k] int64 of each token's experts.

    logits [T, E]. The weights are differentiable in them. renormalise: whether the weights of a token are
    divided by their sum. Raises ValueError on a bad shape or dtype, and if k is not in 1..E.
    """
    check_dtype("topk_softmax", logits=logits)
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"topk_softmax: logits {tuple(logits.shape)} must be [T, E], and k ({k}) in 1..E")
    return _TopkSoftmax.apply(logits, k, renormalise)
