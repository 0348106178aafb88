"""The router of DeepSeek-V3's kind: each expert has a score of its own, and a bias corrects the choice alone.

    s = sigmoid(z) = 1 / (1 + exp(-z));   c = s + b
    groups: the G experts' groups with the largest sum of their two largest c;   of their experts the k with
    the largest c are chosen
    w_j = f s_j, or f s_j / (sum of the chosen s + 1e-20)

b balances the load. No gradient reaches it, and none goes through the choice. With S the sum, and
t = sum over the chosen of dw_j s_j / S:

    renormalised:  dz_j = f (dw_j - t) / S  s_j (1 - s_j);   else  dz_j = f dw_j s_j (1 - s_j)

dz of an expert that was not chosen is 0. Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2; transformers'
DeepseekV3TopkRouter and Glm4MoeTopkRouter.

Shapes: z [T, E] router logits; b [E] fp32; ids [T, k] int64, by falling c; w [T, k] fp32 (fp64 for fp64). T
tokens, E experts in groups of equal size, k experts of a token, f the scale.
Roundings: 1 + exp(-z), s and c are rounded once each in fp32, and so are the sum of two c of a group, S,
s / S and the product with f. dz is rounded once.
Order: the chosen s are added slot after slot.
Of equal sums the group with the lower index is chosen, and of equal c the expert with the lower index, in the
reference and on a GPU. transformers' topk leaves that open.
Not finite: with a logit that is NaN or infinite all w of the token are NaN, and its c count as equal. So its
logprobs are NaN as well, and nothing hides it.
"""

from typing import NamedTuple

import numpy as np
import torch

from .backend import on_triton
from .grad import accumulate_dtype, check_dtype

TINY = 1e-20  # added to the sum of the scores


class Choice(NamedTuple):
    """How many experts of a token are chosen, and from how many groups."""

    k: int
    groups: int = 1
    top_groups: int = 1


class Weighing(NamedTuple):
    """How the scores of the chosen experts become weights."""

    renormalise: bool
    scale: float = 1.0


def choose_ref(logits_TE: torch.Tensor, bias_E: torch.Tensor, choice: Choice) -> torch.Tensor:
    """The ids [T, k]."""
    T, E = logits_TE.shape
    acc = accumulate_dtype(logits_TE.dtype)
    c = (_scores(logits_TE.to(acc)) + bias_E.to(acc)).numpy()
    c[~_finite(logits_TE).numpy()] = 0.0
    if choice.groups > 1:
        grouped = c.reshape(T, choice.groups, -1)
        two = np.sort(grouped, axis=2)[:, :, -2:]
        # A stable sort keeps the lower index first among equals.
        best = np.argsort(-(two[..., 0] + two[..., 1]), axis=1, kind="stable")[:, : choice.top_groups]
        kept = np.zeros((T, choice.groups, 1), dtype=bool)
        np.put_along_axis(kept, best[:, :, None], True, 1)
        c = np.where(kept, grouped, -np.inf).reshape(T, E)
    return torch.from_numpy(np.ascontiguousarray(np.argsort(-c, axis=1, kind="stable")[:, : choice.k]))


def weigh_ref(logits_TE: torch.Tensor, ids_Tk: torch.Tensor, how: Weighing) -> torch.Tensor:
    """Forward only: the weights [T, k]."""
    s = _scores(logits_TE.to(accumulate_dtype(logits_TE.dtype))).gather(1, ids_Tk)
    w = s / _sum(s) if how.renormalise else s
    return torch.where(_finite(logits_TE).unsqueeze(1), w * how.scale, torch.nan)


def weigh_bwd_ref(
    dw_Tk: torch.Tensor, logits_TE: torch.Tensor, ids_Tk: torch.Tensor, how: Weighing
) -> torch.Tensor:
    """The gradient of the logits, [T, E], in their dtype."""
    s = _scores(logits_TE.to(dw_Tk.dtype)).gather(1, ids_Tk)
    ds = dw_Tk
    if how.renormalise:
        total = _sum(s)
        ds = (dw_Tk - _slot_sum(dw_Tk * (s / total))) / total
    dz = how.scale * ds * s * (1.0 - s)
    dz = torch.where(_finite(logits_TE).unsqueeze(1), dz, torch.nan)
    return torch.zeros_like(logits_TE).scatter_(1, ids_Tk, dz.to(logits_TE.dtype))


def _scores(z: torch.Tensor) -> torch.Tensor:
    return 1.0 / torch.exp(-z).add_(1.0)


def _finite(logits_TE: torch.Tensor) -> torch.Tensor:
    return logits_TE.isfinite().all(1)


def _sum(s_Tk: torch.Tensor) -> torch.Tensor:
    return _slot_sum(s_Tk) + TINY


def _slot_sum(x_Tk: torch.Tensor) -> torch.Tensor:
    """The sum of each row, one number after another, [T, 1]."""
    first, *rest = x_Tk.split(1, dim=1)
    for x in rest:
        first = first + x
    return first


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids, how):
        ctx.save_for_backward(logits, ids)
        ctx.how = how
        return _weigh(logits, ids, how)

    @staticmethod
    def backward(ctx, dw):
        logits, ids = ctx.saved_tensors
        if not on_triton(logits):
            return weigh_bwd_ref(dw, logits, ids, ctx.how), None, None
        from .sigmoid_router_triton import weigh_bwd

        return weigh_bwd(dw, logits, ids, *ctx.how), None, None


def _weigh(logits: torch.Tensor, ids: torch.Tensor, how: Weighing) -> torch.Tensor:
    if not on_triton(logits):
        return weigh_ref(logits, ids, how)
    from .sigmoid_router_triton import weigh

    return weigh(logits, ids, *how)


@torch.no_grad()
def sigmoid_choice(logits: torch.Tensor, bias: torch.Tensor, choice: Choice) -> torch.Tensor:
    """The ids [T, k] int64 of each token's experts. logits [T, E], bias [E] fp32. It has no gradient.

    Raises ValueError on a bad shape or dtype, for groups that do not divide E or have less than two experts,
    and if the chosen groups have less than k experts.
    """
    check_dtype("sigmoid_choice", logits=logits)
    k, groups, top = choice
    E = logits.shape[-1]
    if logits.dim() != 2 or bias.shape != (E,) or bias.dtype != torch.float32:
        raise ValueError(
            f"sigmoid_choice: logits {tuple(logits.shape)} must be [T, E], and bias {tuple(bias.shape)} in "
            f"{bias.dtype} [E] in float32"
        )
    fits = groups >= 1 and E % groups == 0 and 1 <= top <= groups and (groups == 1 or 2 * groups <= E)
    if not fits or not 1 <= k <= top * (E // groups):
        raise ValueError(
            f"sigmoid_choice: k ({k}), groups ({groups}) and top_groups ({top}) do not fit {E} experts: "
            "groups of at least two must divide them, and those that are chosen must have k"
        )
    if not on_triton(logits):
        return choose_ref(logits, bias, choice)
    from .sigmoid_router_triton import choose

    return choose(logits, bias, *choice)


def sigmoid_weights(logits: torch.Tensor, ids: torch.Tensor, how: Weighing) -> torch.Tensor:
    """The weights [T, k] of the experts ids, in fp32 (fp64 for fp64), differentiable in the logits [T, E].

    ids [T, k] int64, a token's experts, each once. Raises ValueError on a bad shape or dtype, and for an
    expert outside 0..E - 1, if the ids are on the CPU: nobody waits for a GPU.
    """
    check_dtype("sigmoid_weights", logits=logits)
    if logits.dim() != 2 or ids.dim() != 2 or len(ids) != len(logits) or ids.dtype != torch.int64:
        raise ValueError(
            f"sigmoid_weights: logits {tuple(logits.shape)} must be [T, E], and ids {tuple(ids.shape)} in "
            f"{ids.dtype} [T, k] in int64"
        )
    E = logits.shape[1]
    if ids.numel() and ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < E:
        raise ValueError(f"sigmoid_weights: ids must be in 0..{E - 1}, the router's experts")
    return _Weigh.apply(logits, ids, how) if torch.is_grad_enabled() else _weigh(logits, ids, how)
