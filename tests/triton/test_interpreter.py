"""The mended interpreter runs vLLM's kernels, and its matrix products depend on row and column only."""

import numpy as np
import torch

from tests.triton.interpreter import product


def test_vllms_kernels_run_interpreted(batch_invariant):
    x, w = torch.randn(5, 64), torch.randn(64)
    y = batch_invariant.rms_norm_batch_invariant(x, w, 1e-6)
    assert torch.allclose(y, torch.nn.functional.rms_norm(x, (64,), w, 1e-6), atol=1e-5)


def test_an_element_of_a_product_depends_on_its_row_and_column_only():
    rng = np.random.default_rng(0)
    for M, K, N in ((16, 32, 64), (64, 128, 16), (32, 48, 32)):
        a, b = (rng.standard_normal(shape, np.float32) for shape in ((M, K), (K, N)))
        y, m, n = product(a, b), rng.permutation(M), rng.permutation(N)
        assert np.array_equal(product(a[m], b[:, n]), y[m][:, n])
        assert np.array_equal(product(a[:3], b), y[:3])
        assert np.array_equal(product(a, np.asfortranarray(b)), y)
        assert np.allclose(y, a.astype(np.float64) @ b, atol=1e-4)
