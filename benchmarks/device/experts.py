"""A mixture of experts beside plain torch: one product for each expert, of rows that lie sorted.

The widths are those of Qwen3-30B-A3B. Plain torch has the rows of each expert given, and routes nothing.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from zerokl.benchmarks.machine import Machine, Row, row
from zerokl.kernels.combine_experts import combine_experts
from zerokl.kernels.expert_rows import expert_rows
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.grouped_linear import grouped_linear
from zerokl.kernels.linear import linear
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass
from zerokl.kernels.silu_mul import silu_mul
from zerokl.kernels.topk_softmax import topk_softmax

# Experts, experts of a token, hidden size, and size of an expert.
_QWEN3_30B_A3B, _TOY = (128, 8, 2048, 768), (6, 2, 32, 16)


class _Mixture:
    """Weights of one layer, and T tokens with the gradient of their output."""

    def __init__(self, m: Machine, T: int, dtype: torch.dtype):
        self.E, self.k, D, inner = _TOY if m.small else _QWEN3_30B_A3B
        shapes = (self.E, D), (self.E * 2 * inner, D), (self.E * D, inner)
        weights = [m.randn(*shape, dtype=dtype, scale=shape[1] ** -0.5).requires_grad_() for shape in shapes]
        self.router, self.gate_up, self.down = weights
        buffers = {w: GradBuffer(torch.zeros(1, *w.shape, device=m.device), empty=[0]) for w in weights}
        self.x, self.dy = m.randn(T, D, dtype=dtype).requires_grad_(), m.randn(T, D, dtype=dtype)
        self.in_pass = Pass(token_blocks([T]), buffers)
        with torch.no_grad():
            _, ids = topk_softmax(linear(self.x, self.router), self.k, renormalise=True)
        self.rows = expert_rows(ids, self.E, self.x)
        flat = ids.flatten()
        self.sorted = flat.sort(stable=True).indices // self.k  # the token of each row
        ends = flat.bincount(minlength=self.E).cumsum(0)
        self.bounds = list(pairwise([0, *ends.tolist()]))  # the rows of each expert

    def forward(self) -> torch.Tensor:
        q, ids = topk_softmax(linear(self.x, self.router, None, self.in_pass), self.k, renormalise=True)
        rows = expert_rows(ids, self.E, self.x)
        h = silu_mul(grouped_linear(self.x, self.gate_up, rows, self.in_pass))
        return combine_experts(h, self.down, q, rows, self.in_pass)

    def step(self) -> None:
        """Forward and backward, into buffers that count as empty."""
        for buffer in self.in_pass.buffers.values():
            buffer.empty.add(0)
        self.forward().backward(self.dy)
        self.x.grad = None

    def plain(self) -> torch.Tensor:
        """The three products of each expert, and their sum without weights."""
        y = torch.zeros_like(self.x)
        gate_ups, downs = self.gate_up.chunk(self.E), self.down.chunk(self.E)
        for (start, end), gate_up, down in zip(self.bounds, gate_ups, downs, strict=True):
            tokens = self.sorted[start:end]
            g, u = F.linear(self.x[tokens], gate_up).chunk(2, 1)
            y = y.index_add(0, tokens, F.linear(F.silu(g) * u, down))
        return y

    def plain_step(self) -> None:
        self.plain().backward(self.dy)
        self.x.grad = self.gate_up.grad = self.down.grad = None

    def gate_up_rows(self) -> torch.Tensor:
        return grouped_linear(self.x, self.gate_up, self.rows)

    def plain_gate_up(self) -> torch.Tensor:
        x, gate_ups = self.x[self.sorted], self.gate_up.chunk(self.E)
        return torch.cat([F.linear(x[a:b], w) for (a, b), w in zip(self.bounds, gate_ups, strict=True)])


def expert_rates(m: Machine, dtype: torch.dtype) -> Iterator[Row]:
    """The grouped product of gate and up, a layer's forward, and a small step: forward and backward."""
    for T in (16, m.tokens):
        mixture = _Mixture(m, T, dtype)
        flops = 2.0 * T * mixture.k * mixture.gate_up.shape[0] // mixture.E * mixture.gate_up.shape[1]
        name = f"{mixture.E} experts, {T} tokens"
        with torch.no_grad():
            yield row(
                m,
                f"{name}, gate and up",
                flops,
                "TFLOP/s",
                mixture.gate_up_rows,
                mixture.plain_gate_up,
            )
            yield row(m, f"{name}, forward", 1.5 * flops, "TFLOP/s", mixture.forward, mixture.plain)
    yield row(m, f"{name}, forward and backward", 4.5 * flops, "TFLOP/s", mixture.step, mixture.plain_step)
