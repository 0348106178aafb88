"""The ground these tests stand on."""

import torch


def test_vllms_kernels_run_interpreted(batch_invariant):
    x, w = torch.randn(5, 64), torch.randn(64)
    y = batch_invariant.rms_norm_batch_invariant(x, w, 1e-6)
    assert torch.allclose(y, torch.nn.functional.rms_norm(x, (64,), w, 1e-6), atol=1e-5)
