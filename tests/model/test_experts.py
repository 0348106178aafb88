"""A router whose logits have another dtype than the rest of its layer."""

import torch
from zerokl.files.bitwise import equal
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass
from zerokl.kernels.tile_tables import DEFAULT_TABLE
from zerokl.model.config import Experts
from zerokl.model.experts import run_experts

from tests.helpers import randn

T, D, E, SIZE = 24, 32, 4, 16
EXPERTS = Experts(number=E, per_token=2, size=SIZE, renormalise=True, layers=frozenset([0]))


def gradient_of_router(router_dtype: torch.dtype | None, buffered: bool) -> torch.Tensor:
    """[E, D], in fp32 from a buffer, else as autograd returns it, in bf16."""
    shapes = {"router": (E, D), "experts.gate_up": (E * 2 * SIZE, D), "experts.down": (E * D, SIZE)}
    w = {
        name: randn(i, *shape, dtype=torch.bfloat16).requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }
    buffers = {x: GradBuffer.like(x) for x in w.values()} if buffered else {}
    in_pass, x = Pass(token_blocks([T]), buffers), randn(9, T, D, dtype=torch.bfloat16)
    y = run_experts(EXPERTS, w, x, in_pass, DEFAULT_TABLE, router_dtype, lambda *_: None, lambda _, ids: ids)
    y.backward(randn(8, T, D, dtype=torch.bfloat16))
    assert buffered == (w["router"].grad is None)
    return buffers[w["router"]].zeroed([0])[0] if buffered else w["router"].grad


def test_the_gradient_of_a_router_in_fp32_is_in_its_buffer_and_is_that_of_autograd():
    in_buffer = gradient_of_router(torch.float32, True)
    assert in_buffer.dtype == torch.float32
    assert equal(in_buffer.bfloat16(), gradient_of_router(torch.float32, False))
    assert not equal(in_buffer, gradient_of_router(None, True)), "control: logits that are rounded"
