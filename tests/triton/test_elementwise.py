"""silu_mul, rope and the embedding's gradient on Triton have the bits of written-out arithmetic.

For silu_mul and rope it is the arithmetic of vLLM's CUDA operations, in numpy and in fp64.
"""

import numpy as np
import pytest
import torch
from zerokl.kernels.embedding_triton import embedding_bwd, sorted_ids
from zerokl.kernels.rope import rope_ref, rope_table
from zerokl.kernels.rope_triton import rotate
from zerokl.kernels.silu_mul_triton import silu_mul_fwd

from tests.helpers import DTYPES, randint, randn, total_unequal


def written_out_silu_mul(gu: torch.Tensor, round_silu: bool = True) -> torch.Tensor:
    g, u = (x.float().numpy() for x in gu.chunk(2, dim=1))
    silu = torch.from_numpy(g / (np.float32(1.0) + np.exp(-g)))
    silu = silu.to(gu.dtype).float() if round_silu else silu
    return (silu * torch.from_numpy(u + np.float32(0.0))).to(gu.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 48, 1024, 1500])
def test_silu_mul_has_the_written_out_bits(width, dtype):
    gu = randn(width, 5, 2 * width, dtype=dtype, scale=4.0)
    # exp(-g) overflows at g = -120. vLLM adds 0.0 to u, which turns -0.0 into 0.0.
    gu[0, 0], gu[1, width] = -120.0, -0.0
    assert total_unequal([silu_mul_fwd(gu)], [written_out_silu_mul(gu)]) == 0


def test_control_silu_that_is_not_rounded_has_other_bits():
    gu = randn(0, 5, 2048, dtype=torch.bfloat16)
    assert total_unequal([silu_mul_fwd(gu)], [written_out_silu_mul(gu, round_silu=False)]) > 0


def fused_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """y1 = fma(x1, cos, -(x2 sin)) and y2 = fma(x1, sin, x2 cos), in fp64.

    A product of two fp32 numbers is exact in fp64, so fma(a, b, c) = round(a b + c). On an H100, vLLM's
    compiled rotary_embedding has these bits in bf16, fp16 and fp32.
    """
    x1, x2 = x.float().chunk(2, dim=-1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    y1 = x1.double() * c.double() - (x2 * s).double()
    y2 = x1.double() * s.double() + (x2 * c).double()
    return torch.cat([y1.float(), y2.float()], dim=-1).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "D"), [(1, 2), (3, 64), (9, 128), (8, 96)])
def test_rope_has_the_bits_of_nvccs_fusion_both_ways(H, D, dtype):
    qkv = randn(D, 6, H + 2, D, dtype=dtype)
    cos, sin = (t[7:13].float() for t in rope_table([100.0 ** (-i / D) for i in range(D // 2)], 20, dtype))
    # The first is a slice of wider rows, as in the decoder. The second is dense.
    for x in (qkv[:, :H], qkv[:, :H].clone()):
        assert total_unequal([rotate(x, cos, sin)], [fused_rope(x, cos, sin)]) == 0
        assert total_unequal([rotate(x, cos, sin, inverse=True)], [fused_rope(x, cos, -sin)]) == 0


def test_control_rope_with_the_other_product_fused_has_other_bits():
    x = randn(0, 6, 4, 64)
    cos, sin = rope_table([100.0 ** (-i / 64) for i in range(32)], 6, torch.float32)
    (x1, x2), c, s = x.chunk(2, dim=-1), cos.unsqueeze(1), sin.unsqueeze(1)
    other = (x2.double() * c.double() + (x1 * s).double()).float()
    assert total_unequal([rotate(x, cos, sin)[..., 32:]], [other]) > 0


def test_control_rope_without_fusion_has_other_bits():
    x = randn(0, 6, 4, 64)
    cos, sin = rope_table([100.0 ** (-i / 64) for i in range(32)], 6, torch.float32)
    assert total_unequal([rotate(x, cos, sin)], [rope_ref(x, cos, sin)]) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_gradient_adds_token_after_token(dtype):
    ids, dx, before = randint(0, 5, 40), randn(1, 40, 300, dtype=dtype), randn(2, 7, 300)
    acc, expected = before.clone(), before.clone()
    embedding_bwd(acc, sorted_ids(ids), dx)
    for t, v in enumerate(ids):
        expected[v] += dx[t].float()
    assert total_unequal([acc], [expected]) == 0


def test_control_embedding_gradient_in_another_order_is_found():
    ids, dx = randint(0, 5, 40), randn(1, 40, 300)
    forwards, backwards = torch.zeros(7, 300), torch.zeros(7, 300)
    embedding_bwd(forwards, sorted_ids(ids), dx)
    embedding_bwd(backwards, sorted_ids(ids.flip(0)), dx.flip(0))
    assert total_unequal([forwards], [backwards]) > 0
