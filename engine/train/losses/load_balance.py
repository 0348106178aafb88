"""The load-balancing loss of a mixture of experts, of one sequence.

    aux = E sum_e f_e P_e;   f_e = (times that expert e was chosen) / R;   P_e = (sum of p_e over rows) / R

Source: Switch Transformer, arXiv:2101.03961, equations 4 to 6, in the form of transformers'
load_balancing_loss_func. It is k where all k choices are spread evenly. f has no gradient:

    dp_e = E f_e / R;   dz = p (dp - sum_e dp_e p_e)

Shapes: z [C, L, E] router logits of the rows that predict a sequence's C drawn tokens, in its L layers with
experts; R = C L; ids [C, L, k] the chosen experts.
Order: the numbers of choices are integers. Both sums are in fp64, one number after another. A sequence's loss
and gradient depend on its own rows only, so neither a micro-batch nor a rank decides a bit of them. The
usual loss over a whole batch would need all choices of a step before the first backward.
Roundings: p as in kernels/topk_softmax.py; aux is rounded once to fp32, and dz once to the dtype of z.
"""

import torch

from ....kernels.topk_softmax import topk_softmax_bwd_ref, topk_softmax_ref


class _LoadBalance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, ids):
        E = z.shape[-1]
        _, _, p = topk_softmax_ref(z.reshape(-1, E), 1, False)
        counts = torch.bincount(ids.reshape(-1).long(), minlength=E).double()
        share = E * counts / len(p) ** 2  # of p: E f / R
        ctx.save_for_backward(p, share.float())
        ctx.shape, ctx.dtype = z.shape, z.dtype
        return (share * p.double().cumsum(0)[-1]).cumsum(0)[-1].float()

    @staticmethod
    def backward(ctx, d):
        p, share = ctx.saved_tensors
        every_expert = torch.arange(p.shape[1], device=p.device).expand(p.shape)
        dp = (d * share).to(p.dtype).expand(p.shape)
        dz = topk_softmax_bwd_ref(dp, p, every_expert, p, False)
        return dz.view(ctx.shape).to(ctx.dtype), None


def load_balance(z: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The loss of a sequence, a scalar in fp32 that is differentiable in z.

    z [C, L, E] router logits, ids [C, L, k] the chosen experts, both of at least one row.
    """
    return _LoadBalance.apply(z, ids)
