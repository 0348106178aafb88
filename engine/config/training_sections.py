"""The sections optimizer, memory, evaluation, monitor, checkpoint and ledger of the configuration."""

from typing import Literal

from pydantic import Field

from .section import WHERE_SET, PlannedRun, Section, Temperature, free, rule, setting


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101), or Muon, on fp32 master weights."""

    name: Literal["adamw", "muon"] = setting(
        "adamw", head=WHERE_SET, also_called="optim optimizer_type optimizer_name"
    )
    """muon: the matrices of the layers move along the polar factor of their momentum (Jordan et al.,
    kellerjordan.github.io/posts/muon), which has one moment. All other weights have AdamW.
    """
    lr: float = setting(1e-4, ge=0, common=True, also_called="learning_rate actor_learning_rate max_lr")
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "cosine_with_restarts", "wsd"] = setting(
        "constant", common=True, also_called="lr_scheduler_type lr_scheduler lr_decay_style"
    )
    """The learning rate after the warm-up: constant, or falling to min_lr_ratio until the end of the run. wsd
    (warm-up, stable, decay) is constant first, and falls linearly over the last decay_ratio of the updates.
    """
    cycles: int = setting(1, ge=1, head=WHERE_SET, also_called="num_cycles")
    """How often cosine_with_restarts falls from lr."""
    decay_ratio: float = setting(0.1, gt=0, le=1, head=WHERE_SET, also_called="num_decay_steps")
    """Share of the updates after the warm-up over which wsd falls."""
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
    momentum: float = setting(0.95, ge=0, lt=1, head=WHERE_SET, also_called="muon_momentum")
    """Decay of Muon's momentum, an average of the gradients."""
    nesterov: bool = setting(True, head=WHERE_SET)
    """Whether Muon mixes the gradient into the momentum once more before it takes the polar factor."""
    ns_steps: int = setting(5, ge=1, le=20, head=WHERE_SET, also_called="muon_num_ns_steps")
    """Newton-Schulz iterations of a polar factor, of three products each, in fp32."""
    adjust_lr: Literal["match_rms_adamw", "original"] = setting(
        "match_rms_adamw", head=WHERE_SET, also_called="adjust_lr_fn muon_scale_mode"
    )
    """By what Muon's steps are scaled. match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that they are about
    as large as AdamW's (arXiv:2502.16982). original: sqrt(max(1, rows / columns)).
    """
    muon_lr_ratio: float = setting(1.0, gt=0, le=1e6, head=WHERE_SET)
    """Learning rate of Muon's matrices, in units of the rate of the other weights."""
    moments: Literal["float32", "bfloat16", "int8"] = setting(
        "float32",
        head=WHERE_SET,
        needs_whole=lambda moments: moments == "int8",
        also_called="optimizer_state_dtype optim_bits",
    )
    """How the moments are kept between updates, which compute in fp32. bfloat16: rounded to the nearest; half
    the memory, and small changes of a moment are lost. int8: codes of 8 bits, with a scale for 256 of them
    (arXiv:2110.02861); a quarter of the memory.
    """
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices (not of norms and biases), per unit of learning rate."""
    max_grad_norm: float = setting(
        1.0, ge=0, common=True, also_called="max_norm grad_clip clip_grad gradient_clipping"
    )
    """A gradient with a larger global norm is scaled down to this norm; 0 is off."""

    @rule
    def _muon(self, run: PlannedRun) -> str | None:
        settings = "momentum", "nesterov", "ns_steps", "adjust_lr", "muon_lr_ratio"
        others = [name for name in settings if getattr(self, name) != type(self).model_fields[name].default]
        if self.name != "muon" and others:
            return f'optimizer.{others[0]} is of name = "muon", not of "{self.name}"; leave it out'
        if self.name == "muon" and run.config.lora.rank:
            return (
                f'optimizer.name ("muon") with lora.rank ({run.config.lora.rank}): A and B are factors of a '
                'step, and the polar factor of either is none of their product; set it to "adamw"'
            )
        if self.name == "muon" and self.moments == "int8":
            return (
                'optimizer.moments ("int8") with optimizer.name ("muon"): 8 bits are for AdamW\'s moments; '
                'set it to "bfloat16" or "float32"'
            )

    @rule
    def _schedule(self, run: PlannedRun) -> str | None:
        if self.cycles != 1 and self.schedule != "cosine_with_restarts":
            return (
                f'optimizer.cycles ({self.cycles}) is of schedule = "cosine_with_restarts", '
                f'not of "{self.schedule}"'
            )
        if self.decay_ratio != 0.1 and self.schedule != "wsd":
            return (
                f'optimizer.decay_ratio ({self.decay_ratio}) is of schedule = "wsd", not of "{self.schedule}"'
            )


class MemoryConfig(Section, head=free("copies, which change no bit")):
    """Memory beside the device. It changes no bit of the result."""

    offload: Literal["auto", "none", "host", "disk"] = setting(
        "auto",
        needs_whole=lambda place: place in ("host", "disk"),
        also_called="offload_optimizer offload_param optimizer_offload param_offload cpu_offload "
        "fsdp_offload_params",
    )
    """Where lies what no kernel reads: fp32 master weights (not of fp32 training, which computes with them),
    the optimizer's moments, the gradient's partial sums, LoRA's base, and, with recompute = "layer", the
    inputs of layers until their backward. none: on the device. host: in the host's memory, from where it
    comes by slices. disk: in files without a name in the folder for temporary files (TMPDIR). auto: on a GPU
    the first of these with which the step is predicted to fit, and on a CPU none.
    """

    @rule
    def _one_rank_of_gpus(self, run: PlannedRun) -> str | None:
        if self.offload in ("host", "disk") and run.ranks > 1 and run.device == "cuda":
            return (
                f'memory.offload ("{self.offload}") with {run.ranks} ranks on GPUs: what ranks exchange lies '
                'on their GPUs; set it to "none", or start one process'
            )


class EvaluationConfig(Section, head=free("only reads the weights, with random numbers of its own")):
    """Held-out evaluation."""

    every: int = setting(10, ge=0, common=True, also_called="eval_steps test_freq eval_interval val_period")
    """Steps between evaluations; one more is done before the first step, and one at the end. 0 is off."""
    problems: int = setting(128, ge=1, common=True)
    """Number of held-out problems at most."""
    num_generations: int = Field(1, ge=1)
    """Completions of each problem."""
    temperature: Temperature = Field(0.0, ge=0)
    """Temperature; 0 is greedy. The filters are those of the section sampling."""
    training: bool = False
    """Evaluate the policy on as many training problems too, drawn at the training temperature."""
    both_policies: bool = True
    """Where the sampler differs from the trainer, evaluate both policies, on held-out and on training
    problems. Elsewhere there is one policy, and this does nothing.
    """


class MonitorConfig(Section, head=free("only measures, with random numbers of its own")):
    """Measurements beside the training. They change no bit of it."""

    gradient: int = setting(0, ge=0, needs_whole=bool)
    """Steps between measurements of the gradient's bias: the gradient from the sampler's rollouts, under each
    correction, against two from exact rollouts of the same prompts (docs/gradient.md). 0 is off.
    """

    @rule
    def _bias(self, run: PlannedRun) -> str | None:
        if self.gradient and run.config.exact and not run.config.max_staleness:
            return (
                f"monitor.gradient ({self.gradient}) with exact = true: every rollout is exact, so its "
                "gradient has no bias to measure; set exact = false for a sampler that differs, or "
                "monitor.gradient = 0"
            )
        if self.gradient and run.config.loss.trains_given:
            return (
                f"monitor.gradient ({self.gradient}) with a loss of given tokens (dpo, verifree): no sampler "
                "decides them; set it to 0, or choose another loss"
            )


class CheckpointConfig(Section, head=free("decides only what is kept")):
    """Checkpoints after some steps and always after the last one.

    They are in Hugging Face format, with the fp32 master weights and what a resumed run needs.
    """

    every: int = setting(0, ge=0, common=True, also_called="save_steps save_freq save_interval")
    """Steps between checkpoints; with 0 only the last step has one."""
    keep: int = setting(0, ge=0, common=True, also_called="save_total_limit max_ckpt_num")
    """The number of newest checkpoints to keep; 0 keeps all."""


class LedgerConfig(Section):
    """The run's ledger: hashes of all that a step computes."""

    detail: Literal["roots", "gradients", "full"] = setting(
        "full", head=free("decides only what is written down; the roots are the same")
    )
    """Quantities whose hash is written down for each weight: none (roots), the gradients, or optimizer state
    and weights as well (full). More detail costs only space.
    """
    state_every: int = Field(1, ge=1)
    """Steps between hashes of optimizer state and weights. A larger number saves time with a large model. It
    is part of the run's fingerprint.
    """
