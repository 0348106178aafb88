"""The load-balancing loss of a mixture of experts, of one sequence.

    aux = E sum_e f_e P_e;   f_e = (times that expert e was chosen) / R;   P_e = (sum of p_e over rows) / R

Source: Switch Transformer, arXiv:2101.03961, equations 4 to 6, in the form of transformers'
load_balancing_loss_func. It is k where all k choices are spread evenly. f has no gradient:

    dp_e = E f_e / R;   dz = p (dp - sum_e dp_e p_e)

p is the softmax of a row. Of a router that scores each expert alone it is s / sum s with s = sigmoid(z), and
aux is k times DeepSeek-V3's (arXiv:2412.19437, equations 17 to 20):

    ds = (dp - sum_e dp_e p_e) / sum s;   dz = ds s (1 - s)

Shapes: z [C, L, E] router logits of the rows that predict a sequence's C drawn tokens, in its L layers with
experts; R = C L; ids [C, L, k] the chosen experts.
Order: the numbers of choices are integers. Both sums are in fp64, one number after another. A sequence's loss
and gradient depend on its own rows only, so neither a micro-batch nor a rank decides a bit of them. The
usual loss over a whole batch would need all choices of a step before the first backward.
Roundings: p as in kernels/topk_softmax.py, or s and s / sum s once each in fp32, the sum one number after
another; aux is rounded once to fp32, and dz once to the dtype of z.
"""

import torch

from ....kernels.grad import accumulate_dtype
from ....kernels.topk_softmax import topk_softmax_bwd_ref, topk_softmax_ref


class _LoadBalance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, ids, sigmoid):
        E = z.shape[-1]
        p, s = _probabilities(z.reshape(-1, E), sigmoid)
        counts = torch.bincount(ids.reshape(-1).long(), minlength=E).double()
        share = E * counts / len(p) ** 2  # of p: E f / R
        ctx.save_for_backward(p, share.float(), s)
        ctx.shape, ctx.dtype = z.shape, z.dtype
        return (share * p.double().cumsum(0)[-1]).cumsum(0)[-1].float()

    @staticmethod
    def backward(ctx, d):
        p, share, s = ctx.saved_tensors
        every_expert = torch.arange(p.shape[1], device=p.device).expand(p.shape)
        dp = (d * share).to(p.dtype).expand(p.shape)
        dz = topk_softmax_bwd_ref(dp, p, every_expert, p, False)
        if s is not None:  # p (dp - sum) / s = (dp - sum) / sum s
            dz = dz * (1.0 - s)
        return dz.view(ctx.shape).to(ctx.dtype), None, None


def _probabilities(z: torch.Tensor, sigmoid: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """p of the rows z [R, E]; and s, where the router has scores."""
    if not sigmoid:
        return topk_softmax_ref(z, 1, False)[2], None
    s = 1.0 / torch.exp(-z.to(accumulate_dtype(z.dtype))).add_(1.0)
    return s / s.cumsum(1)[:, -1:], s


def load_balance(z: torch.Tensor, ids: torch.Tensor, sigmoid: bool = False) -> torch.Tensor:
    """The loss of a sequence, a scalar in fp32 that is differentiable in z.

    z [C, L, E] router logits, ids [C, L, k] the chosen experts, both of at least one row. sigmoid: whether
    the router scores each expert alone.
    """
    return _LoadBalance.apply(z, ids, sigmoid)
