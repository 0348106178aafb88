"""Every launch of this folder's tests is looked at, and the stand-in for Triton makes its descriptors."""

import pytest
import torch
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor
from zerokl.kernels import matmul_tma_triton, matmul_triton, tiles

from tests.gpu.without_triton import ragged_descriptor
from tests.helpers import randn


def test_control_a_block_that_tma_refuses_fails_a_test_of_a_kernel(monkeypatch):
    monkeypatch.setattr(tiles, "_TMA_MIN_TILES", 1)
    x = randn(0, 128, 64, dtype=torch.bfloat16)
    matmul_triton.matmul(x, x)

    def boxes(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [512, columns])

    monkeypatch.setattr(matmul_tma_triton, "_boxes", boxes)
    with pytest.raises(AssertionError, match=r"_matmul_tma, x_desc: block\[0\] \(512\) must be 1 to 256"):
        matmul_triton.matmul(x, x)


def test_the_stand_in_for_a_ragged_descriptor_is_tritons():
    x = torch.zeros(100, 3 * 64, dtype=torch.bfloat16)[:, 64:128]
    ours, tritons = ragged_descriptor(x, [32, 64]), create_ragged_descriptor(x, [32, 64])
    assert ours.base is tritons.base
    for name in ("shape", "strides", "block_shape"):
        assert getattr(ours, name) == getattr(tritons, name)
