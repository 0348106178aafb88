"""A residual addition and a norm in one order, inside vLLM's own models.

Interface: vllm/model_executor/custom_op.py.

In batch-invariant mode vLLM's RMSNorm runs a Triton kernel. With a residual it calls the CUDA operation
fused_add_rms_norm instead, whose bits can depend on the batch. That operation sums a row with up to 1,024
threads below 256 tokens, and with up to 256 threads from 256 tokens on
(csrc/libtorch_stable/layernorm_kernels.cu). So a row may have other bits in a decode than in a long prefill,
and no trainer can have both.

Measured on an H100 with vLLM 0.32: 100 rows of a call of 300 tokens beside the same rows in a call of 100
tokens. At width 4096, 12 of 409,600 elements differ in fp16, and 121,406 in fp32. At smaller widths none
differs.

So RMSNorm becomes the class below, through vLLM's registry of replacements. The sum is rounded to the model's
dtype, as fused_add_rms_norm rounds it. Then vLLM's own batch-invariant kernel norms it. kernels/rms_norm.py
computes the same.
"""

import torch
from vllm.model_executor import custom_op
from vllm.model_executor.layers.layernorm import RMSNorm


class OneOrderRMSNorm(RMSNorm):
    """vLLM's RMSNorm whose residual addition is an operation of its own."""

    def forward_cuda(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """norm(x); with a residual, (norm(s), s) where s = x + residual.

        x, residual [..., D] of one dtype.
        """
        if residual is None:
            return super().forward_cuda(x)
        s = x + residual
        return super().forward_cuda(s), s


def use_one_order() -> None:
    """Replace RMSNorm in the models that vLLM builds in this process from now on.

    Raises ValueError where another plugin has replaced RMSNorm.
    """
    replacement = custom_op.op_registry_oot.get(RMSNorm.__name__)
    if replacement is None:
        RMSNorm.register_oot(OneOrderRMSNorm)
    elif replacement is not OneOrderRMSNorm:
        raise ValueError(
            f"vllm: RMSNorm is replaced by {replacement.__module__}.{replacement.__name__}; "
            "exact training needs vLLM's: remove that plugin"
        )
