"""vLLM's own model as an exact sampler: batch-invariant mode on a GPU, drawn from with zerokl's keys.

    python -m zerokl train CONFIG.toml --device cuda --sampler vllm-stock

The model, its kernels, the paged cache and the scheduler are vLLM's; of ours are the draw (draw.py), where
the weights come from, and an addition that is an operation of its own (norm.py). The trainer's Triton kernels
have the arithmetic of vLLM's, operation by operation (tests/triton/test_stock_model.py): a matrix product's
tiles along K, one order of every sum, one rounding at each place.

That has been shown with interpreted and compiled kernels. No GPU has run it yet: what would show there first
is a tile of few rows, which vLLM's tuned tables take and which another tensor-core instruction computes
(kernels/tiles.py). The monitor compares every token.

CUDA graphs and the compiler stay off: both replace operations, or freeze the tiles that were looked up for
one number of rows. Prefix caching and chunked prefill are safe: keys and values are rows, and a row's bits do
not depend on the others. Two cases in which vLLM itself is not invariant: the addition before a norm, which
norm.py replaces, and heads of 256 on Blackwell, whose tiles differ in a prefill.

All of it is for the whole process, the trainer's: vLLM's mode also replaces torch's own products, softmax and
mean on CUDA tensors, which zerokl's kernels do not use.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from ....model.config import ModelConfig
from ....model.weights import Layout
from ...config import VllmConfig
from .plugin import STOCK
from .sampler import KeyedSampler, prepare_vllm

# What vLLM reads from the environment, most of it when it is imported.
ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    # fp32 operands of Triton's products as they are; its default rounds them to tf32, and zerokl's kernels do
    # not.
    "TRITON_F32_DEFAULT": "ieee",
}
# The backend whose kernel ours follows, and every operation of vLLM's as its CUDA or Triton kernel rather
# than torch's.
ARGUMENTS: dict[str, Any] = {
    "attention_backend": "TRITON_ATTN",
    "compilation_config": {"custom_ops": ["all"]},
}
# A module of vLLM that reads ENVIRONMENT as it is imported.
_READER = "vllm.v1.attention.ops.triton_unified_attention"
_prepared = False


def prepare_batch_invariance() -> None:
    """Put vLLM, in this process, into batch-invariant mode.

    Raises ValueError where it has been imported in another.
    """
    late = [name for name, value in ENVIRONMENT.items() if os.environ.get(name) != value]
    if late and _READER in sys.modules:
        raise ValueError(
            f"vllm: it was imported in this process without {late[0]} = {ENVIRONMENT[late[0]]}; start a new process"
        )
    os.environ.update(ENVIRONMENT)
    prepare_vllm(multiprocess=False)
    global _prepared
    _prepared = True


def refuse_after_exact() -> None:
    """Raise ValueError where `prepare_batch_invariance` has changed this process's vLLM for good:

    it is not vLLM as it comes.
    """
    if _prepared:
        raise ValueError(
            "vllm: this process has sampled with vllm-stock exactly, in batch-invariant mode; start a new one for vLLM as it comes"
        )


class StockSampler(KeyedSampler):
    """vLLM's own model over weights taken from `flat` [layout.numel], the trainer's, at every update.

    For a GPU: on a CPU vLLM's kernels are other ones and not batch-invariant (engine/runs/samplers.py refuses
    it). Raises ValueError as KeyedSampler does, or where vLLM is already in use in another mode.
    """

    def __init__(
        self,
        model: Path,
        config: ModelConfig,
        layout: Layout,
        flat: torch.Tensor,
        cfg: VllmConfig,
        version: int = 0,
    ):
        prepare_batch_invariance()
        from .norm import use_one_order

        use_one_order()
        super().__init__(
            model, config, flat, cfg, (STOCK, {"flat": flat, "layout": layout}), version, ARGUMENTS
        )
