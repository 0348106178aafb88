"""The polar factor of a matrix by a fixed number of Newton-Schulz iterations: Muon's step.

    X = M / max(|M|, 1e-7)        each iteration: A = X X^T,  X = a X + (b A + c A A) X

X = U S V^T keeps U and V, and each iteration sends its singular values s to a s + b s^3 + c s^5. The
coefficients do not reach 1 but come near it fast: after five iterations most values lie in 0.7 to 1.2.
Source: Jordan et al., "Muon", kellerjordan.github.io/posts/muon; torch.optim.Muon, which rounds to bf16.

Shapes: M and the result [R, C] fp32. Where R > C, M^T is iterated, so that A is the smaller of two.
Roundings: |M| is summed in fp64 and rounded once. Products are fp32 sums (matmul.py). Each scaling and each
sum of matrices is rounded to fp32, without fused products.
Order: the products are matmul's, in the order of their static shapes: neither threads nor ranks decide a
bit. |M|^2 is a binary tree over the elements, row by row.
"""

import torch

from .matmul import matmul
from .order import tree_sum

_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


def polar(m_RC: torch.Tensor, iterations: int) -> torch.Tensor:
    """About U V^T of M = U S V^T. [R, C] fp32 -> [R, C] fp32, contiguous. fp64 stays fp64."""
    is_tall = m_RC.shape[0] > m_RC.shape[1]
    x = (m_RC.t() if is_tall else m_RC).contiguous()
    norm = tree_sum(x.double().square().view(-1), 0).sqrt_().clamp_(min=_EPS)
    x = x / norm.to(x.dtype)
    for _ in range(iterations):
        gram = matmul(x, x)
        x = x * _A + matmul(gram * _B + matmul(gram, gram.t()) * _C, x.t())
    return (x.t() if is_tall else x).contiguous()
