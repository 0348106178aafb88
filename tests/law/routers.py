"""The sigmoid router as functions of its logits, for the tests of the law."""

import torch
from zerokl.kernels.sigmoid_router import Choice, Weighing, sigmoid_choice, sigmoid_weights

from tests.helpers import randn

CHOICE, HOW = Choice(3, groups=4, top_groups=2), Weighing(True, 2.5)
EXPERTS = 12


def bias() -> torch.Tensor:
    """[E] fp32."""
    return randn(77, EXPERTS, scale=0.3)


def chosen(logits: torch.Tensor, how: Weighing = HOW) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights [T, k] and the experts [T, k] of logits [T, E]."""
    ids = sigmoid_choice(logits, bias(), CHOICE)
    return sigmoid_weights(logits, ids, how), ids


def plain(logits: torch.Tensor, how: Weighing = HOW) -> torch.Tensor:
    """The weights as transformers' Glm4MoeTopkRouter computes them, in the dtype of the logits."""
    s = logits.sigmoid()
    c = s + bias().to(s.dtype)
    two = c.view(len(c), CHOICE.groups, -1).topk(2, dim=-1)[0].sum(dim=-1)
    kept = torch.zeros_like(two).scatter_(1, two.topk(CHOICE.top_groups, dim=-1)[1], 1).bool()
    kept = kept.repeat_interleave(EXPERTS // CHOICE.groups, 1)
    ids = c.masked_fill(~kept, float("-inf")).topk(CHOICE.k, dim=-1)[1]
    w = s.gather(1, ids)
    w = w / (w.sum(dim=-1, keepdim=True) + 1e-20) if how.renormalise else w
    return w * how.scale
