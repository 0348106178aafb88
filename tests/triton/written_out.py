"""The arithmetic of vLLM's router (csrc/moe/topk_softmax_kernels.cu), written out number by number."""

import numpy as np
import torch

from tests.kernels.test_experts import butterfly


def written_out_topk(
    logits: torch.Tensor, k: int, renormalise: bool, ties: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of each row. ties: -1 lets the higher of equal experts come first."""
    weights, ids = [], []
    for z in logits.float().numpy():
        terms = np.exp(z - z.max())
        p = terms * (np.float32(1.0) / butterfly(terms, 16 // logits.itemsize))
        chosen = sorted(range(len(p)), key=lambda e, p=p: (-p[e], ties * e))[:k]
        total = np.float32(0.0)
        for e in chosen:
            total += p[e]
        weights.append(p[chosen] * (np.float32(1.0) / total) if renormalise else p[chosen])
        ids.append(chosen)
    return torch.tensor(np.array(weights)), torch.tensor(ids)
