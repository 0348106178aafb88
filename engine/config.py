"""The configuration of a run: frozen models. config_file.py reads and writes them.

The line under a field gives its meaning and unit; `zerokl train --help` and docs/configuration.md show it.
Which settings go together: compatibility.py.
"""

from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..kernels.sampling_params import SamplingParams
from .loss.config import LossConfig
from .precision import PrecisionConfig


def section(model: type[BaseModel]) -> Parameter:
    """The place of a section's settings in the help: a group under the section's docstring."""
    name = model.__name__.removesuffix("Config").lower()
    return Parameter(group=Group(name, help=model.__doc__ or ""))


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class TaskConfig(_Section):
    """What is learnt."""

    name: str = "add"
    """add, sort, countdown, jsonl, or your own task as module:object."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task, e.g. { max_value = 99, train = 512, held_out = 256 } for add."""
    reward: str = ""
    """Your own reward as module:function(problem, completion) -> float; empty is the task's own."""
    perfectible_only: bool = True
    """Train on the task's problems that `zerokl init` found solved sometimes but not always, where the model
    folder names any.
    """
    problems: int = Field(0, ge=0)
    """Train on that many of them at most, the first; 0 is all."""


class SamplingConfig(_Section):
    """How completions are drawn."""

    temperature: float = Field(1.0, gt=0)
    """Temperature of the softmax.

    0 (greedy) is refused: a policy without randomness has no policy gradient.
    """
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most likely tokens that reach this probability; 1 keeps all."""
    max_tokens: int = Field(16, ge=1)
    """Completion tokens at most, the end-of-sequence token included."""

    @property
    def sampling_params(self) -> SamplingParams:
        """The same as the kernels know it."""
        return SamplingParams(self.temperature, self.top_k, self.top_p)


class PerturbConfig(_Section):
    """Mismatch on demand:

    how the native sampler is made to differ from the trainer (perturb.py). Needs exact = false.
    """

    logit_noise: float = Field(0.0, ge=0)
    """Standard deviation of what is added to each logit, after the temperature."""
    round_weights: Literal["", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"] = ""
    """The sampler's weights are rounded to this dtype."""
    gain: float = Field(1.0, ge=0)
    """Factor on the difference that round_weights makes."""
    temperature: float = Field(0.0, ge=0)
    """Temperature of the sampler; 0 is the trainer's."""
    delay: int = Field(0, ge=0)
    """Steps by which the sampler's weights are late, though it says they are not."""

    @property
    def any(self) -> bool:
        """Whether the sampler differs in any of these."""
        return bool(self.logit_noise or self.round_weights or self.temperature or self.delay)


class NativeConfig(_Section):
    """The native sampler. Nothing here changes a bit of the result."""

    max_concurrency: int = Field(64, ge=1)
    """Samples drawn at once."""
    max_batch_tokens: int = Field(1024, ge=1)
    """Tokens of one forward; longer prompts are read in chunks."""
    cache_bytes: int = Field(4 << 30, ge=1)
    """Upper limit of the key-value cache, bytes."""


class VllmConfig(_Section):
    """vLLM as the sampler. Nothing here changes a bit of the result."""

    multiprocess: bool = False
    """Run vLLM's engine in a process of its own."""
    context: int = Field(0, ge=0)
    """Longest sequence, tokens; 0 is the model's context, but at most 4096."""
    max_concurrency: int = Field(64, ge=1)
    """Samples drawn at once (max_num_seqs)."""
    max_batch_tokens: int = Field(2048, ge=1)
    """Tokens of one forward (max_num_batched_tokens)."""
    chunked_prefill: bool = True
    """Read long prompts in chunks."""
    prefix_caching: bool = True
    """Share the cache of equal prefixes."""
    block_tokens: int = Field(32, ge=32, multiple_of=32)
    """Positions of a cache block (block_size)."""
    cache_bytes: int = Field(1 << 30, ge=1)
    """Size of the key-value cache, bytes (kv_cache_memory_bytes)."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of vllm.LLM, by vLLM's names. Those that would break exactness are refused."""


class OptimizerConfig(_Section):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) on fp32 master weights."""

    lr: float = Field(1e-4, ge=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up: constant, or down to min_lr_ratio over the run."""
    warmup_steps: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly to lr."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of lr."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices (not of norms and biases), per unit of learning rate."""
    max_grad_norm: float = Field(1.0, ge=0)
    """The gradient is scaled down to this global norm; 0 is off."""


class EvaluationConfig(_Section):
    """Held-out evaluation."""

    every: int = Field(10, ge=0)
    """Steps between evaluations, and one at the end; 0 is off."""
    problems: int = Field(128, ge=1)
    """Held-out problems at most."""
    num_generations: int = Field(1, ge=1)
    """Completions of each problem."""
    temperature: float = Field(0.0, ge=0)
    """Temperature; 0 is greedy. top_k and top_p are those of sampling."""


class CheckpointConfig(_Section):
    """Checkpoints in Hugging Face format with the fp32 master weights, and what a resumed run needs.

    The last step always has one.
    """

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 keeps only the last."""
    keep: int = Field(0, ge=0)
    """Newest checkpoints to keep; 0 keeps all."""


class LedgerConfig(_Section):
    """The run's ledger: hashes of all that a step computes."""

    detail: Literal["roots", "gradients", "full"] = "full"
    """What has a hash of each weight written down:

    nothing, the gradients, or optimizer state and weights as well. Costs space only.
    """
    state_every: int = Field(1, ge=1)
    """Steps between hashes of optimizer state and weights.

    More saves time with a large model; part of the run's fingerprint.
    """


class Config(_Section):
    """A training run."""

    model: str = "init:tiny"
    """Model folder, hub name (owner/name), or init:PRESET to make a base model for the task as `zerokl init`
    does.
    """
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Compute dtype of sampler and trainer. Master weights and optimizer state are fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where sampler and trainer compute; auto is a CUDA GPU where there is one (and vLLM, if it samples, is
    not its build for CPUs). Changes the bits: a GPU's kernels sum in another order than the reference on a
    CPU.
    """
    seed: int = Field(0, ge=0, lt=1 << 32)
    """Seed of the run: problem order and every token drawn."""
    steps: int = Field(100, ge=1)
    """Training steps."""
    prompts: int = Field(16, ge=1)
    """Prompts of a step (P)."""
    num_generations: int = Field(8, ge=1)
    """Completions of each prompt (G)."""
    micro_batch: int = Field(16, ge=1)
    """Sequences of one forward and backward, in each worker. Bounds memory; changes no bit."""
    virtual_shards: int = Field(8, ge=1, le=1 << 16)
    """Parts into which a step's sequences are cut; a power of two. The order of the gradient's sum."""
    updates_per_rollout: int = Field(1, ge=1)
    """Optimizer updates on each step's rollouts.

    loss and entropy are those of the first, grad_norm and lr of the last.
    """
    exact: bool = True
    """Stop at the first token whose trainer logprob is not bit for bit its sampler logprob."""
    threads: int = Field(0, ge=0, le=1 << 16)
    """CPU threads; 0 leaves torch's choice. Changes no bit."""
    workers: int = Field(0, ge=0, le=1 << 16)
    """Processes that sample and train side by side, each on its share of the threads, rounded down to a power
    of two; 0 chooses by model size. Changes no bit.
    """
    sampler: Literal["native", "vllm", "hf", "vllm-stock"] = "native"
    """Which engine draws the completions: zerokl's own, or vLLM (in an environment that has it) with our
    decoder; they draw the same tokens. On a GPU also vLLM with its own model in batch-invariant mode
    (vllm-stock), whose arithmetic our kernels follow. Or, with exact = false, a foreign one: transformers'
    generate (hf), or vLLM as it comes (vllm-stock).
    """
    max_staleness: int = Field(0, ge=0)
    """Updates by which the weights sampled from may be older than the trainer's; they are renewed when they
    would be older.
    """

    task: Annotated[TaskConfig, section(TaskConfig)] = TaskConfig()
    sampling: Annotated[SamplingConfig, section(SamplingConfig)] = SamplingConfig()
    loss: Annotated[LossConfig, section(LossConfig)] = LossConfig()
    optimizer: Annotated[OptimizerConfig, section(OptimizerConfig)] = OptimizerConfig()
    precision: Annotated[PrecisionConfig, section(PrecisionConfig)] = PrecisionConfig()
    evaluation: Annotated[EvaluationConfig, section(EvaluationConfig)] = EvaluationConfig()
    checkpoint: Annotated[CheckpointConfig, section(CheckpointConfig)] = CheckpointConfig()
    ledger: Annotated[LedgerConfig, section(LedgerConfig)] = LedgerConfig()
    native: Annotated[NativeConfig, section(NativeConfig)] = NativeConfig()
    vllm: Annotated[VllmConfig, section(VllmConfig)] = VllmConfig()
    perturb: Annotated[PerturbConfig, section(PerturbConfig)] = PerturbConfig()

    @property
    def samples_older_weights(self) -> bool:
        """Whether the sampler keeps weights that no checkpoint of the trainer holds:

        such a run is done again from its first step only.
        """
        return bool(self.max_staleness or self.perturb.delay)

    @field_validator("virtual_shards")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value
