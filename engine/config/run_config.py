"""The configuration of a run, as frozen models. config_file.py reads and writes them.

The text under a field gives its meaning and unit. `zerokl train --help` and docs/configuration.md show it.
compatibility.py says which settings go together.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from ...kernels.sampling_params import SamplingParams, bias_by_id, refuse_penalties
from ..tasks.base import RewardSettings
from .init_section import InitConfig
from .lora_section import LoraConfig
from .loss_section import LossConfig
from .perturb_section import PerturbConfig
from .precision_section import PrecisionConfig, ShortNames
from .sampler_names import EXTERNAL, RENAMED, SAMPLERS, SamplerName, listed
from .section import Section, Temperature
from .vllm_section import VllmConfig

# Sections whose keys zerokl does not define.
FREE_SECTIONS = ("task.options", "init.sizes", "vllm.engine", "sampling.logit_bias")
_SAMPLER_HELP = (
    f"The engine that draws the completions: {listed(SAMPLERS)}. native and vllm-zerokl draw the same "
    "tokens. hf and vllm need exact = false; vllm-exact needs a GPU."
)


def _in_order(ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Equal sets are equal settings, so that the ledger chains the same."""
    return None if ids is None else tuple(sorted(set(ids)))


def _by_id(logit_bias: Any) -> Any:
    """The same for a table whose keys are ids."""
    if not isinstance(logit_bias, dict):
        return logit_bias
    return {str(token): bias for token, bias in bias_by_id(logit_bias).items()}


class TaskConfig(Section):
    """What the model learns."""

    name: str = "add"
    """add, sort, sums, countdown, jsonl, pairs; with an environment calculator, guesses, wordle, nim, python;
    or your own task as module:object. Given as a flag or in a grid, another name takes the place of all that
    the file or --preset chose in this section.
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task, e.g. { max_value = 99, train = 512, held_out = 256 } for add."""
    reward: str = ""
    """exact, numeric, math (engine/tasks/answers.py), or your own as module:function(problem, completion) ->
    float; empty is the task's own.
    """
    answer_prefix: str = ""
    """Text between a reasoning and its answer. The answer is the problem's, and its probability the reward
    (advantage verifree); or it is drawn (advantage brpo). A reasoning ends with the first token of this text,
    such as </think>, or at max_tokens. Empty: there are no reasonings.
    """
    equivalence: str = ""
    """Your own module:function(a, b) -> bool, which says whether the texts of two completions mean the same
    (loss.semantic_entropy); empty is equal text after strip(). It runs as rewards do, with their limits.
    """
    reward_processes: int = Field(0, ge=0, le=256)
    """Processes that compute rewards of yours, and math's; as many more for an equivalence of yours. 0 is one
    for each core, 16 at most.
    """
    reward_timeout_s: float = Field(300.0, gt=0, le=1e6)
    """Seconds that one reward, or one group's equivalence, may take. What takes longer ends the run, and
    decides no bit.
    """
    reward_memory_bytes: int = Field(0, ge=0)
    """Bytes of memory that each of these processes may ask for; 0 is half of the machine's memory."""
    directory: str = ""
    """Folder in which modules, and relative names of files in options, are looked up; empty is the current
    one. A run writes down where it was started.
    """
    perfectible_only: bool = True
    """Train only on problems that the model solved sometimes but not always in `zerokl init`. This has no
    effect where the model folder names no such problems for this task.
    """
    problems: int = Field(0, ge=0)
    """Train on this many problems at most, the first ones; 0 is all."""

    @property
    def reward_settings(self) -> RewardSettings:
        """Which reward there is, and how it is computed."""
        return RewardSettings(
            self.name,
            self.options,
            self.directory,
            self.reward,
            self.reward_processes,
            self.reward_timeout_s,
            self.reward_memory_bytes,
        )


class EnvironmentConfig(Section):
    """Trajectories of many turns. Only a task that has an environment takes it."""

    max_turns: int = Field(8, ge=1, le=10_000)
    """Turns of a trajectory at most; in a game, of each player."""
    max_tokens: int = Field(0, ge=0)
    """Drawn tokens of a trajectory at most; 0 is as many as max_turns turns of sampling.max_tokens have."""
    context: int = Field(0, ge=0)
    """All tokens of a trajectory at most, those that nobody drew included; 0 is the model's context."""
    render: Literal["template", "append"] = "template"
    """How a later content is put into the chat template. template refuses a template that writes earlier
    turns in another way, or drops their thoughts; append keeps all turns as they were drawn.
    """
    processes: int = Field(0, ge=0, le=256)
    """Processes that play environments; 0 is one for each core, 16 at most. It changes no bit."""
    timeout_s: float = Field(60.0, gt=0, le=1e6)
    """Seconds that an environment may take to answer one turn. A trajectory that takes longer ends."""
    memory_bytes: int = Field(0, ge=0)
    """Bytes of memory that each of these processes may ask for; 0 is half of the machine's memory."""


class SamplingConfig(Section):
    """How completions are drawn."""

    temperature: Temperature = Field(1.0, gt=0)
    """Temperature of the softmax. 0 (greedy) is refused: a greedy policy has no policy gradient."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most likely tokens until their probabilities together reach this; 1 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep the tokens with at least this share of the largest probability; 0 keeps all."""
    logit_bias: Annotated[dict[str, float], BeforeValidator(_by_id)] = Field(default_factory=dict)
    """Added to the logits of single tokens, in nats: { 17 = -2.5 } for the token id 17. -100 to 100."""
    allowed_token_ids: Annotated[tuple[int, ...] | None, AfterValidator(_in_order)] = None
    """Draw only these token ids; without it, any. A stop token that is missing here ends no completion."""
    max_tokens: int = Field(16, ge=1)
    """Tokens of a completion, or of a turn, at most, the end-of-sequence token included."""
    answer_max_tokens: int = Field(0, ge=0)
    """Tokens of an answer at most, the end-of-sequence token included (advantage brpo); 0 is max_tokens."""

    @property
    def sampling_params(self) -> SamplingParams:
        """The distribution that tokens are drawn from, as the kernels take it."""
        logit_bias = {int(token): bias for token, bias in self.logit_bias.items()}
        return SamplingParams.of(
            self.temperature, self.top_k, self.top_p, self.min_p, logit_bias, self.allowed_token_ids
        )

    @model_validator(mode="before")
    @classmethod
    def _no_penalty(cls, values: Any) -> Any:
        if isinstance(values, dict):
            refuse_penalties("sampling", values)
        return values

    @model_validator(mode="after")
    def _ids(self) -> "SamplingConfig":
        self.sampling_params.check()
        return self


class NativeConfig(Section):
    """The native sampler. These settings change no bit of the result."""

    max_concurrency: int = Field(64, ge=1)
    """Samples drawn at once."""
    max_batch_tokens: int = Field(0, ge=0)
    """Tokens of one forward that reads prompts; longer ones are read in chunks. 0 is 1024, on a GPU 16384."""
    cache_bytes: int = Field(0, ge=0)
    """Upper limit of the key-value cache, bytes. 0 is 4 GiB on a CPU, and 0.3 of the free memory of a GPU."""


class PoolConfig(Section):
    """Sampler actors on any nodes, which draw while the trainer trains. They change no bit of the result."""

    engine: Literal["", "ray"] = ""
    """ray: actors of a Ray cluster draw the training rollouts (the extra `ray` of the package). Empty: the
    trainer's own processes draw them, before they train.
    """
    address: str = ""
    """Address of the Ray cluster, such as auto or HOST:PORT. Empty starts one here, for the run."""
    actors: int = Field(1, ge=1, le=1 << 16)
    """Actors that draw. One that ends, or takes too long, is replaced."""
    cpus: float = Field(1.0, gt=0, le=1 << 16)
    """CPUs that an actor reserves; it has as many threads, rounded down, and one at least."""
    gpus: float = Field(0.0, ge=0, le=16)
    """GPUs that an actor reserves. No GPU has run an actor yet."""
    batch: int = Field(0, ge=0)
    """Requests that an actor is given at a time. 0 is an equal part of those that are ready for each actor,
    at most native.max_concurrency.
    """
    in_flight: int = Field(2, ge=1, le=64)
    """Such batches that an actor has at a time, the one that it draws included. The others wait."""
    timeout_s: float = Field(600.0, gt=0, le=1e6)
    """Seconds that an actor may take to start and for one batch. Then it is replaced, and the batch is drawn
    by another actor.
    """


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) on fp32 master weights."""

    lr: float = Field(1e-4, ge=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or falling to min_lr_ratio until the end of the run."""
    warmup_steps: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly to lr."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of lr."""
    critic_lr_ratio: float = Field(10.0, gt=0, le=1e6)
    """Learning rate of a critic's head, in units of the rate of the other weights (advantage gae)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices (not of norms and biases), per unit of learning rate."""
    max_grad_norm: float = Field(1.0, ge=0)
    """A gradient with a larger global norm is scaled down to this norm; 0 is off."""


class EvaluationConfig(Section):
    """Held-out evaluation."""

    every: int = Field(10, ge=0)
    """Steps between evaluations; one more is done before the first step, and one at the end. 0 is off."""
    problems: int = Field(128, ge=1)
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


class MonitorConfig(Section):
    """Measurements beside the training. They change no bit of it."""

    gradient: int = Field(0, ge=0)
    """Steps between measurements of the gradient's bias: the gradient from the sampler's rollouts, under each
    correction, against two from exact rollouts of the same prompts (docs/gradient.md). 0 is off.
    """


class CheckpointConfig(Section):
    """Checkpoints after some steps and always after the last one.

    They are in Hugging Face format, with the fp32 master weights and what a resumed run needs.
    """

    every: int = Field(0, ge=0)
    """Steps between checkpoints; with 0 only the last step has one."""
    keep: int = Field(0, ge=0)
    """The number of newest checkpoints to keep; 0 keeps all."""


class ParallelConfig(Section):
    """How training is spread over ranks. These settings change no bit of the result."""

    engine: Literal["replicated", "fsdp"] = "replicated"
    """replicated: every rank has all weights. fsdp: each rank keeps its rows of every weight, and a layer is
    whole only while it computes (torch.distributed.fsdp.fully_shard); one pass has one virtual shard,
    whatever micro_batch is.
    """


class LedgerConfig(Section):
    """The run's ledger: hashes of all that a step computes."""

    detail: Literal["roots", "gradients", "full"] = "full"
    """Quantities whose hash is written down for each weight: none (roots), the gradients, or optimizer state
    and weights as well (full). More detail costs only space.
    """
    state_every: int = Field(1, ge=1)
    """Steps between hashes of optimizer state and weights. A larger number saves time with a large model. It
    is part of the run's fingerprint.
    """


class Config(Section):
    """A training run."""

    model: str = "init:tiny"
    """Model folder, hub name (owner/name), or init:PRESET, which makes a base model for the task as
    `zerokl init` does. Given as a flag, another one takes the place of the file's init.sizes too.
    """
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], ShortNames] = "float32"
    """Compute dtype of sampler and trainer; fp32, bf16 and fp16 will do. Master weights and optimizer state
    are always fp32.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where sampler and trainer compute. auto is a CUDA GPU where there is one, unless the vLLM that samples
    is a build for CPUs; otherwise it is the CPU. The device changes the bits: the kernels on a GPU sum in
    another order than the reference on a CPU.
    """
    seed: int = Field(0, ge=0, lt=1 << 32)
    """Seed of the run: problem order and every token drawn."""
    steps: int = Field(100, ge=1)
    """Training steps."""
    prompts: int = Field(16, ge=1)
    """Prompts of a step (P). A game of n players has n of them."""
    num_generations: int = Field(8, ge=1)
    """Completions of each prompt (G)."""
    micro_batch: int = Field(0, ge=0)
    """Sequences of one forward and backward, in each worker. It bounds memory and changes no bit. 0 is 16,
    and on a GPU as many as have 16,384 tokens and fit."""
    shards_in_flight: int = Field(0, ge=0)
    """Virtual shards that are computed together, each with a gradient buffer of its own. It changes no bit.
    0 is 1 on a CPU, and on a GPU as many as a quarter of its free memory holds."""
    recompute: Literal["none", "layer"] = "none"
    """layer: the backward computes each layer again instead of keeping its activations. It changes no bit."""
    frozen: tuple[str, ...] = ()
    """Weights that are not trained, as patterns of their names in the checkpoint, such as
    model.embed_tokens.* or model.layers.0.*; repeat the flag for several. With tied embeddings lm_head and
    the embedding are one weight. The ledger chains the names and hashes of the frozen weights.
    """
    virtual_shards: int = Field(8, ge=1, le=1 << 16)
    """Parts into which a step's sequences are cut; a power of two. Sets the order of the gradient's sum."""
    updates_per_rollout: int = Field(1, ge=1)
    """Optimizer updates on each step's rollouts. The metrics loss and entropy are those of the first update,
    grad_norm and lr those of the last.
    """
    exact: bool = True
    """Stop at the first token whose trainer logprob is not bit for bit its sampler logprob."""
    threads: int = Field(0, ge=0, le=1 << 16)
    """CPU threads; 0 leaves the choice to torch. It changes no bit."""
    workers: int = Field(0, ge=0, le=1 << 16)
    """Processes that sample and train side by side, each on its share of the threads. The number is rounded
    down to a power of two; 0 chooses by model size. It changes no bit.
    """
    sampler: SamplerName = Field("native", description=_SAMPLER_HELP)
    max_staleness: int = Field(0, ge=0)
    """Updates by which the sampler's weights may be older than the trainer's."""
    staleness_schedule: Literal["periodic", "lagged"] = "periodic"
    """Which older weights draw, with max_staleness above 0. periodic: the sampler keeps its weights, and
    renews them before they become older than allowed. lagged: each step draws with the weights that the step
    max_staleness / updates_per_rollout steps before it began with, and the first steps with the first
    weights. So later steps can be drawn while the trainer trains (pool.engine).
    """

    tracking: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ("tensorboard",)
    """Where the metrics go besides RUN/metrics.jsonl; repeat the flag for several. All but tensorboard are
    extras of the package. Each library takes its own environment variables. It changes no bit.
    """

    task: TaskConfig = TaskConfig()
    init: InitConfig = InitConfig()
    sampling: SamplingConfig = SamplingConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    loss: LossConfig = LossConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    monitor: MonitorConfig = MonitorConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    ledger: LedgerConfig = LedgerConfig()
    native: NativeConfig = NativeConfig()
    pool: PoolConfig = PoolConfig()
    vllm: VllmConfig = VllmConfig()
    perturb: PerturbConfig = PerturbConfig()

    @property
    def rollouts_per_prompt(self) -> int:
        """Completions of each prompt; with the advantage brpo reasonings and answers."""
        cuts = self.loss.cuts(self.num_generations)
        return cuts.rollouts if cuts else self.num_generations

    @property
    def sampler_differs(self) -> bool:
        """Whether the sampler differs from the trainer in more than the age of its weights."""
        return self.sampler in EXTERNAL or self.perturb.any or self.precision.sampler_differs

    @property
    def samples_older_weights(self) -> bool:
        """Whether the sampler keeps older weights that no checkpoint of the trainer holds.

        Such a run can be resumed or replayed from its first step only.
        """
        return self.lag is None or bool(self.perturb.delay)

    @property
    def lag(self) -> int | None:
        """Steps by which the sampler's weights are late; None where they are renewed periodically.

        A pool of actors without staleness has a lag of 0.
        """
        if self.max_staleness and self.staleness_schedule == "periodic":
            return None
        return self.max_staleness // self.updates_per_rollout

    @field_validator("sampler", mode="before")
    @classmethod
    def _renamed(cls, value: Any) -> Any:
        if isinstance(value, str) and value in RENAMED:
            raise ValueError(RENAMED[value])
        return value

    @field_validator("virtual_shards")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value
