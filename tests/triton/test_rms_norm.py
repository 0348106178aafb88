"""rms_norm's Triton kernels have the bits of vLLM's kernel; both are interpreted."""

import pytest
import torch
from zerokl.kernels import rms_norm_triton
from zerokl.kernels.qk_norm import qk_norm
from zerokl.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_ref

from tests.helpers import DTYPES, randn, total_unequal

EPS = 1e-6
# Below, at and above the tile of a head and vLLM's tile of 1024. Some widths are no multiple of 16.
WIDTHS = (1, 64, 100, 128, 130, 896, 1000, 1024, 1536, 2560)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", WIDTHS)
def test_rms_norm_has_vllms_bits(batch_invariant, D, dtype):
    x, w = randn(D, 7, D, dtype=dtype, scale=3.0), randn(D + 1, D, dtype=dtype)
    expected = batch_invariant.rms_norm_batch_invariant(x, w, EPS)
    assert total_unequal([rms_norm(x, w, EPS)], [expected]) == 0
    with torch.no_grad():
        assert total_unequal([rms_norm(x[3:4], w, EPS)], [expected[3:4]]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_qk_norm_has_vllms_bits_for_each_head(batch_invariant, D, dtype):
    qkv, wq, wk = randn(D, 5, 8, D, dtype=dtype), randn(1, D, dtype=dtype), randn(2, D, dtype=dtype)
    qk = qkv[:, :6]  # a slice of wider rows, as in the decoder
    norm = batch_invariant.rms_norm_batch_invariant
    expected = torch.cat([norm(qkv[:, :4], wq, EPS), norm(qkv[:, 4:6], wk, EPS)], dim=1)
    assert total_unequal([qk_norm(qk, wq, wk, 4, EPS)], [expected]) == 0
    assert total_unequal([qk_norm(qk.clone(), wq, wk, 4, EPS)], [expected]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", WIDTHS)
def test_add_rms_norm_rounds_the_sum_and_then_has_vllms_bits(batch_invariant, D, dtype):
    x, residual = randn(D, 7, D, dtype=dtype), randn(D + 1, 7, D, dtype=dtype)
    w = randn(D + 2, D, dtype=dtype)
    y, s = add_rms_norm(x, residual, w, EPS)
    assert total_unequal([s], [x + residual]) == 0
    assert total_unequal([y], [batch_invariant.rms_norm_batch_invariant(x + residual, w, EPS)]) == 0


def test_control_another_tile_has_other_bits(batch_invariant, monkeypatch):
    x, w = randn(0, 20, 2560), randn(1, 2560)
    expected = batch_invariant.rms_norm_batch_invariant(x, w, EPS)
    assert total_unequal([rms_norm(x, w, EPS)], [expected]) == 0
    monkeypatch.setattr(rms_norm_triton, "TILE", 512)
    assert total_unequal([rms_norm(x, w, EPS)], [expected]) > 0


def test_control_the_weight_multiplied_after_rounding_has_other_bits(batch_invariant):
    x, w = randn(0, 20, 256, dtype=torch.bfloat16), randn(1, 256, dtype=torch.bfloat16)
    rounded_twice = rms_norm_ref(x, torch.ones_like(w), EPS)[0] * w
    assert total_unequal([rounded_twice], [batch_invariant.rms_norm_batch_invariant(x, w, EPS)]) > 0
