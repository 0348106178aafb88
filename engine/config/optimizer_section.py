"""The section `optimizer` of the configuration (run_config.py)."""

from typing import Literal

from pydantic import Field

from .section import WHERE_SET, Section, setting


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) on fp32 master weights."""

    lr: float = setting(1e-4, ge=0, common=True, also_called="learning_rate actor_learning_rate max_lr")
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant", common=True, also_called="lr_scheduler_type lr_scheduler lr_decay_style"
    )
    """The learning rate after the warm-up: constant, or falling to min_lr_ratio until the end of the run."""
    warmup_steps: int = setting(
        0, ge=0, common=True, also_called="warmup_ratio lr_warmup_steps num_warmup_steps"
    )
    """Updates over which the learning rate rises linearly to lr."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of lr."""
    critic_lr_ratio: float = setting(10.0, gt=0, le=1e6, head=WHERE_SET)
    """Learning rate of a critic's head, in units of the rate of the other weights (advantage gae)."""
    beta1: float = setting(0.9, ge=0, lt=1, also_called="adam_beta1")
    """Decay of the first moment."""
    beta2: float = setting(0.95, ge=0, lt=1, also_called="adam_beta2")
    """Decay of the second moment."""
    eps: float = setting(1e-8, gt=0, also_called="adam_epsilon adam_eps")
    """Added to the square root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices (not of norms and biases), per unit of learning rate."""
    max_grad_norm: float = setting(
        1.0, ge=0, common=True, also_called="max_norm grad_clip clip_grad gradient_clipping"
    )
    """A gradient with a larger global norm is scaled down to this norm; 0 is off."""
