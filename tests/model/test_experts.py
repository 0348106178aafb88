"""A router whose logits have another dtype than the rest of its layer."""

from types import SimpleNamespace

import pytest
import torch
from zerokl.engine.rollout.native import NativeSampler
from zerokl.engine.rollout.types import GenerationParams, RngKey, complete
from zerokl.files.bitwise import equal
from zerokl.kernels.grad import GradBuffer
from zerokl.kernels.order import token_blocks
from zerokl.kernels.passes import Pass
from zerokl.kernels.sampling_params import SamplingParams
from zerokl.model.blocks.block import LayerRun, Rows
from zerokl.model.blocks.experts import MixtureOfExperts
from zerokl.model.checkpoint import load_decoder
from zerokl.model.context import no_hook
from zerokl.model.numerics import Numerics
from zerokl.model.operations import ANY_SIZES
from zerokl.model.routing import FREE
from zerokl.model.scoring import logprobs, pack
from zerokl.model.sizes import Experts

from tests.helpers import randn
from tests.model.checkpoints import save_random

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
    context = SimpleNamespace(in_pass=in_pass, routing=FREE)
    layer = LayerRun(0, ANY_SIZES, Numerics(router=router_dtype), (x, x), no_hook)
    y = MixtureOfExperts(EXPERTS).forward(w, Rows(x, x, context), layer).x
    y.backward(randn(8, T, D, dtype=torch.bfloat16))
    assert buffered == (w["router"].grad is None)
    return buffers[w["router"]].zeroed([0])[0] if buffered else w["router"].grad


def test_the_gradient_of_a_router_in_fp32_is_in_its_buffer_and_is_that_of_autograd():
    in_buffer = gradient_of_router(torch.float32, True)
    assert in_buffer.dtype == torch.float32
    assert equal(in_buffer.bfloat16(), gradient_of_router(torch.float32, False))
    assert not equal(in_buffer, gradient_of_router(None, True)), "control: logits that are rounded"


def test_a_router_that_is_nan_gives_nothing_finite(tmp_path):
    """One number of one expert of one layer, as an update may leave it."""
    decoder = load_decoder(save_random("qwen3_moe", tmp_path), torch.float32)
    batch, stop = pack([([1, 2, 3], [4, 5]), ([6], [7])]), frozenset([0])
    with torch.no_grad():
        assert logprobs(decoder, batch, SamplingParams())[0].isfinite().all(), "control"
        decoder.w["layers.1.router"][4, 0] = torch.nan
        assert logprobs(decoder, batch, SamplingParams())[0].isnan().all()
    with pytest.raises(FloatingPointError, match="position 0 are not finite"):
        complete(
            NativeSampler(decoder), [[1, 2]], GenerationParams(SamplingParams(), 1, 2, stop), RngKey(0, 0)
        )
