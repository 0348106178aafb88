"""The sampler `vllm-exact`: vLLM's own model in batch-invariant mode, tokens drawn with zerokl's keys.

    python -m zerokl train CONFIG.toml --device cuda --sampler vllm-exact

The model, its kernels, the paged cache and the scheduler are vLLM's. Three things are ours: the draw
(draw.py), the source of the weights (weight_transfer.py), and the addition before a norm, which is an
operation of its own (norm.py). The trainer's Triton kernels have the arithmetic of vLLM's kernels, operation
by operation (tests/triton/test_vllm_model.py): a matrix product's tiles along K, one order of every sum, one
rounding at each place. The monitor compares every token.

An H200 has run it, with vLLM 0.32's CUDA build, in bf16, fp16 and fp32. Runs had mismatch 0.0 and the
weights of the native sampler, in bf16 with CUDA graphs too. With 2 versions of the weights, none of 2,304
logprobs each was unequal (benchmarks/vllm_exact.py). For fp32, kernels/rope_triton.py fuses the product that
vLLM's compiled rotary embedding fuses, y2 = fma(x1, sin, x2 cos).

On other GPUs or at other widths, a difference would show first in tiles of few rows. vLLM's tuned tables take
such tiles, and another tensor-core instruction computes them (kernels/tiles.py).

The compiler stays off, because it replaces operations. CUDA graphs are off by default (vllm.cuda_graphs),
because vLLM then keeps a copy of the weights. Prefix caching and chunked prefill are safe: keys and values
are rows, and a row's bits do not depend on the other rows. vLLM itself is not invariant in two cases: the
addition before a norm, which norm.py replaces, and heads of 256 on Blackwell, whose tiles differ in a
prefill.

The mode is set for the whole process, which is the trainer's too. It also replaces torch's own products,
softmax and mean on CUDA tensors, which zerokl's kernels do not use.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from ....model.config import ModelConfig
from ....model.weights import Layout
from ...config.vllm_section import VllmConfig
from .plugin import EXACT
from .sampler import KeyedSampler, prepare_vllm

# What vLLM reads from the environment. It reads most of it when it is imported.
ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    # Triton's products take fp32 operands as they are. By default Triton rounds them to tf32, and zerokl's
    # kernels do not.
    "TRITON_F32_DEFAULT": "ieee",
}
# The attention backend whose kernel ours follows. Every operation of vLLM runs as vLLM's CUDA or Triton
# kernel, not as torch's.
ARGUMENTS: dict[str, Any] = {
    "attention_backend": "TRITON_ATTN",
    "compilation_config": {"custom_ops": ["all"]},
}
# A module of vLLM that reads ENVIRONMENT as it is imported.
_READER = "vllm.v1.attention.ops.triton_unified_attention"
# vLLM's registry of replaced operations, which norm.py adds to.
_REGISTRY = "vllm.model_executor.custom_op"


def prepare_batch_invariance() -> None:
    """Put the vLLM of this process into batch-invariant mode.

    Raises ValueError where this process has already imported vLLM in another mode.
    """
    unset = [name for name, value in ENVIRONMENT.items() if os.environ.get(name) != value]
    if unset and _READER in sys.modules:
        raise ValueError(
            f"vllm: it was imported in this process without {unset[0]} = {ENVIRONMENT[unset[0]]}; "
            "start a new process"
        )
    os.environ.update(ENVIRONMENT)
    prepare_vllm(multiprocess=False)


def refuse_after_exact() -> None:
    """Raise ValueError where a VllmExactSampler has changed the vLLM of this process.

    The change is for good, so this process cannot have vLLM as it comes any more. vLLM's own registry shows
    it: there norm.py has replaced RMSNorm. The environment does not show it, because a user may set it for
    vLLM as it comes.
    """
    replaced = getattr(sys.modules.get(_REGISTRY), "op_registry_oot", {}).get("RMSNorm")
    if replaced is not None and replaced.__module__ == f"{__package__}.norm":
        raise ValueError(
            "vllm: this process has sampled with vllm-exact, in batch-invariant mode; "
            "start a new one for vLLM as it comes"
        )


class VllmExactSampler(KeyedSampler):
    """vLLM's own model. At every update it loads the trainer's weights `flat` [layout.numel].

    For a GPU only: on a CPU vLLM has other kernels, which are not batch-invariant (config/compatibility.py
    refuses it). Raises ValueError as KeyedSampler does, or where vLLM is already in use in another mode.
    """

    def __init__(
        self,
        model: Path,
        config: ModelConfig,
        layout: Layout,
        flat: torch.Tensor,
        cfg: VllmConfig,
    ):
        prepare_batch_invariance()
        from .norm import use_one_order

        use_one_order()
        super().__init__(model, config, flat, cfg, (EXACT, {"flat": flat, "layout": layout}), ARGUMENTS)
