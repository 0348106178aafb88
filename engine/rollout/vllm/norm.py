"""A residual addition and a norm in one order, inside vLLM's own models (interface:
vllm/model_executor/custom_op.py).

In batch-invariant mode vLLM's RMSNorm runs a Triton kernel, but with a residual it calls the CUDA operation
fused_add_rms_norm, which sums a row with 1,024 threads below 256 tokens and with 256 threads from there on
(csrc/libtorch_stable/layernorm_kernels.cu): a row wider than 256 has other bits in a decode than in a long
prefill, and no trainer can have both. Through vLLM's registry of replacements RMSNorm becomes this class: the
sum is rounded to the model's dtype, as that operation rounds it, and vLLM's own batch-invariant kernel norms
it. That is what kernels/rms_norm.py computes.
"""

import torch
from vllm.model_executor import custom_op
from vllm.model_executor.layers.layernorm import RMSNorm


class OneOrderRMSNorm(RMSNorm):
    """vLLM's RMSNorm whose residual addition is an operation of its own."""

    def forward_cuda(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """norm(x), or with a residual (norm(s), s) of s = x + residual. x, residual [..., D] of one dtype."""
        if residual is None:
            return super().forward_cuda(x)
        s = x + residual
        return super().forward_cuda(s), s


def use_one_order() -> None:
    """For models that vLLM builds in this process from now on.

    Raises ValueError where another plugin has replaced RMSNorm.
    """
    found = custom_op.op_registry_oot.get(RMSNorm.__name__)
    if found is None:
        RMSNorm.register_oot(OneOrderRMSNorm)
    elif found is not OneOrderRMSNorm:
        raise ValueError(
            f"vllm: RMSNorm is replaced by {found.__module__}.{found.__name__}; exact training needs vLLM's: remove that plugin"
        )
