"""The configuration of a run, as frozen models. config_file.py reads and writes them.

section.py says what a setting is. docs/extend.md shows how to add one.
"""

from typing import Annotated, Any, Literal, get_origin

from pydantic import Field, field_validator

from .init_section import InitConfig
from .lora_section import LoraConfig
from .loss_section import LossConfig
from .perturb_section import PerturbConfig
from .precision_section import PrecisionConfig, ShortNames
from .sampler_names import EXTERNAL, RENAMED, SAMPLERS, SamplerName, listed
from .sampling_section import NativeConfig, PoolConfig, SamplingConfig
from .section import (
    WHERE_SET,
    PlannedRun,
    Section,
    differing,
    free,
    needing_whole,
    rule,
    setting,
    settings_of,
)
from .task_section import EnvironmentConfig, TaskConfig
from .training_sections import (
    CheckpointConfig,
    EvaluationConfig,
    LedgerConfig,
    MemoryConfig,
    MonitorConfig,
    OptimizerConfig,
)
from .vllm_section import VllmConfig

_SPREAD = free("how the work is spread; by the law this decides no bit")
_SAMPLER_HELP = (
    f"The engine that draws the completions: {listed(SAMPLERS)}. native and vllm-zerokl draw the same "
    "tokens. hf and vllm need exact = false; vllm-exact needs a GPU."
)


def needing_whole_rows(run: PlannedRun) -> list[str]:
    """The settings of a run that ranks with parts of the rows are not built with, as `key (value)`."""
    config = run.config
    others = {
        f'device ("{run.device}")': run.device == "cuda",
        f"workers ({config.workers})": config.workers > 1,
        f'sampler ("{config.sampler}")': config.sampler != "native",
        f'pool.engine ("{config.pool.engine}")': bool(config.pool.engine),
    }
    return [name for name, is_set in others.items() if is_set]


def needing_all_experts(run: PlannedRun) -> list[str]:
    """The settings of a run that ranks with parts of the experts are not built with, as `key (value)`."""
    config, spread = run.config, run.config.parallel
    others = {
        f'parallel.engine ("{spread.engine}")': spread.engine == "fsdp",
        f"parallel.tensor ({spread.tensor})": spread.tensor > 1,
        f"parallel.context ({spread.context})": spread.context > 1,
        f"lora.rank ({config.lora.rank})": config.lora.rank > 0,
        f'device ("{run.device}")': run.device == "cuda",
    }
    return [name for name, is_set in others.items() if is_set] + needing_whole(config)


class ParallelConfig(Section, head=_SPREAD):
    """How training is spread over ranks. These settings change no bit of the result."""

    engine: Literal["replicated", "fsdp"] = "replicated"
    """replicated: every rank has all weights. fsdp: each rank keeps its rows of every weight, and a layer is
    whole only while it computes (torch.distributed.fsdp.fully_shard); one pass has one virtual shard,
    whatever micro_batch is.
    """

    @rule
    def _pieces_of_weights(self, run: PlannedRun) -> str | None:
        whole = needing_whole(run.config)
        if self.engine == "fsdp" and run.config.lora.rank and self.tensor * self.context > 1:
            return (
                f'parallel.engine ("fsdp") with lora.rank ({run.config.lora.rank}) and ranks that share '
                'layers or rows: adapters are not spread so; set parallel.engine = "replicated"'
            )
        if self.engine == "fsdp" and whole:
            return (
                f'parallel.engine ("fsdp") with {whole[0]}: this is '
                'not built with sharded weights; leave it out, or set parallel.engine = "replicated"'
            )

    tensor: int = setting(1, ge=1, le=8)
    """Neighbouring ranks that share each layer and its weights (tensor parallelism). They draw and train
    every token of their prompts together. It divides the ranks of the run, and precision.leaves, which
    decides the bits; this decides none.
    """

    @rule
    def _parts_of_layers(self, run: PlannedRun) -> str | None:
        leaves = run.config.precision.leaves
        whole = needing_whole(run.config)
        if leaves % self.tensor:
            return (
                f"parallel.tensor ({self.tensor}) must divide precision.leaves ({leaves}), the parts of the "
                "sums that ranks cut; raise precision.leaves"
            )
        if run.ranks > 1 and run.ranks % self.tensor:
            return (
                f"parallel.tensor ({self.tensor}) must divide the ranks ({run.ranks}); start a multiple "
                "of it, or set it to 1"
            )
        if self.tensor > 1 and run.device == "cuda":
            return (
                f"parallel.tensor ({self.tensor}): shared layers are built for CPUs; set it to 1, or "
                'device = "cpu"'
            )
        if self.tensor > 1 and whole:
            return (
                f"parallel.tensor ({self.tensor}) with {whole[0]}: this is not built with shared layers; "
                "leave one out"
            )

    context: int = setting(1, ge=1, le=64)
    """Ranks that share the tokens of each forward of training, and inside attention its heads (context
    parallelism, Ulysses). Each draws prompts of its own. This number times parallel.tensor divides the ranks
    of the run and the key-value heads.
    """

    @rule
    def _parts_of_rows(self, run: PlannedRun) -> str | None:
        if run.ranks > 1 and run.ranks % (self.context * self.tensor):
            return (
                f"parallel.context ({self.context}) times parallel.tensor ({self.tensor}) must divide the "
                f"ranks ({run.ranks}); start a multiple of {self.context * self.tensor}, or set it to 1"
            )
        whole = needing_whole_rows(run)
        if self.context > 1 and whole:
            return (
                f"parallel.context ({self.context}) with {whole[0]}: this is not built with shared rows; "
                "leave one out"
            )

    expert: int = setting(1, ge=1, le=64)
    """Neighbouring ranks that share the experts of each layer (expert parallelism). They draw and train every
    token of their prompts together, and each computes the rows of its experts. It divides the ranks of the
    run, and the experts.
    """

    @rule
    def _parts_of_experts(self, run: PlannedRun) -> str | None:
        if run.ranks > 1 and run.ranks % self.expert:
            return (
                f"parallel.expert ({self.expert}) must divide the ranks ({run.ranks}); start a multiple "
                "of it, or set it to 1"
            )
        whole = needing_all_experts(run)
        if self.expert > 1 and whole:
            return (
                f"parallel.expert ({self.expert}) with {whole[0]}: this is not built with shared experts; "
                "leave one out"
            )


class Config(Section):
    """A training run."""

    model: str = setting(
        "init:tiny",
        head=free("a place; the architecture and the weights found there are chained instead"),
        common=True,
        also_called="model_name_or_path model_name model_path pretrain hf_checkpoint",
        replaces="init.sizes",
    )
    """Model folder, hub name (owner/name), or init:PRESET, which makes a base model for the task as
    `zerokl init` does. Given as a flag, another one takes the place of the file's init.sizes too.
    """
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], ShortNames] = setting(
        "float32", common=True, also_called="bf16 fp16 torch_dtype mixed_precision compute_dtype"
    )
    """Compute dtype of sampler and trainer; fp32, bf16 and fp16 will do. Master weights are always fp32."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto", common=True)
    """Where sampler and trainer compute. auto is a CUDA GPU where there is one, unless the vLLM that samples
    is a build for CPUs; otherwise it is the CPU. The device changes the bits: the kernels on a GPU sum in
    another order than the reference on a CPU.
    """
    seed: int = setting(0, ge=0, lt=1 << 32, common=True)
    """Seed of the run: problem order and every token drawn."""
    steps: int = setting(
        100,
        ge=1,
        head=free("where a run ends, at a constant rate", lambda c: c.optimizer.schedule == "constant"),
        common=True,
        also_called="max_steps total_training_steps num_train_steps num_rollout",
    )
    """Training steps."""
    prompts: int = setting(
        16,
        ge=1,
        common=True,
        also_called="batch_size train_batch_size rollout_batch_size num_prompts_per_step prompts_per_step",
    )
    """Prompts of a step (P). A game of n players has n of them."""
    num_generations: int = setting(
        8,
        ge=1,
        common=True,
        also_called="n group_size num_samples samples n_samples_per_prompt num_generations_per_prompt",
    )
    """Completions of each prompt (G)."""

    @rule
    def _completions(self, run: PlannedRun) -> str | None:
        if self.num_generations == 1 and self.loss.advantage not in ("batch", "gae"):
            return (
                "num_generations (1) must be at least 2: the advantage compares completions of one prompt "
                '(or set loss.advantage = "batch", or "gae")'
            )
        if self.prompts * self.num_generations < 2:
            return "prompts x num_generations must be at least 2"

    micro_batch: int = setting(
        0,
        ge=0,
        head=free("how many sequences one pass takes; by the law this decides no bit"),
        common=True,
        also_called="micro_batch_size per_device_train_batch_size ppo_micro_batch_size_per_gpu "
        "micro_train_batch_size gradient_accumulation_steps",
    )
    """Sequences of one forward and backward, in each worker. It bounds memory and changes no bit. 0 is 16,
    and on a GPU as many as have 16,384 tokens and fit."""
    shards_in_flight: int = setting(
        0,
        ge=0,
        head=free("how many shards one pass takes; by the law this decides no bit"),
        needs_whole=lambda shards: shards > 1,
    )
    """Virtual shards that are computed together, each with a gradient buffer of its own. It changes no bit.
    0 is 1 on a CPU, and on a GPU as many as a quarter of its free memory holds."""
    recompute: Literal["none", "layer"] = setting(
        "none",
        head=free("what is kept for the backward; the same operations compute it again"),
        also_called="gradient_checkpointing activation_checkpointing",
    )
    """layer: the backward computes each layer again instead of keeping its activations. It changes no bit."""
    frozen: tuple[str, ...] = setting(
        (), head=free("patterns; the names and the bits of the weights that they freeze are chained instead")
    )
    """Weights that are not trained, as patterns of their names in the checkpoint, such as
    model.embed_tokens.* or model.layers.0.*; repeat the flag for several. With tied embeddings lm_head and
    the embedding are one weight. The ledger chains the names and hashes of the frozen weights.
    """

    @rule
    def _adapters_freeze_all(self, run: PlannedRun) -> str | None:
        if self.lora.rank and self.frozen:
            return (
                f"frozen with lora.rank ({self.lora.rank}): with LoRA only the adapters are trained, and all "
                "weights are frozen; leave frozen out, or choose lora.targets"
            )

    virtual_shards: int = Field(8, ge=1, le=1 << 16)
    """Parts into which a step's sequences are cut; a power of two. Sets the order of the gradient's sum."""

    @rule
    def _a_shard_for_each_rank(self, run: PlannedRun) -> str | None:
        spread = self.parallel
        sharing = spread.tensor * spread.context * spread.expert
        if run.ranks & (run.ranks - 1) or run.ranks > self.virtual_shards * sharing:
            return (
                f"ranks ({run.ranks}) must be a power of two and at most virtual_shards "
                f"({self.virtual_shards}) times the {sharing} ranks that share layers, rows or experts"
            )

    updates_per_rollout: int = setting(
        1, ge=1, common=True, also_called="num_iterations ppo_epochs num_inner_updates"
    )
    """Optimizer updates on each step's rollouts. The metrics loss and entropy are those of the first update,
    grad_norm and lr those of the last.
    """
    exact: bool = setting(True, head=free("decides whether a run stops, not what it computes"), common=True)
    """Stop at the first token whose trainer logprob is not bit for bit its sampler logprob."""

    @rule
    def _exact_without_differences(self, run: PlannedRun) -> str | None:
        if self.exact and differing(self):
            return "precision.sampler_* and perturb.* make sampler and trainer differ; set exact = false"

    threads: int = setting(0, ge=0, le=1 << 16, head=_SPREAD)
    """CPU threads; 0 leaves the choice to torch. It changes no bit."""
    workers: int = setting(
        0, ge=0, le=1 << 16, head=_SPREAD, common=True, needs_whole=lambda workers: workers > 1
    )
    """Processes that sample and train side by side, each on its share of the threads. The number is rounded
    down to a power of two; 0 chooses by model size. It changes no bit.
    """

    @rule
    def _one_worker_on_a_gpu(self, run: PlannedRun) -> str | None:
        if run.device == "cuda" and self.workers > 1:
            return f"workers ({self.workers}) must be 0 or 1 on a GPU, which one process keeps busy"

    sampler: SamplerName = setting(
        "native",
        description=_SAMPLER_HELP,
        head=free(
            "native and vllm-zerokl draw the same tokens (others do not)",
            lambda config: config.sampler in ("native", "vllm-zerokl"),
        ),
        common=True,
        also_called="use_vllm vllm_mode rollout_engine inference_backend",
        needs_whole=lambda sampler: sampler != "native",
    )

    @rule
    def _engines(self, run: PlannedRun) -> str | None:
        if self.exact and self.sampler == "vllm":
            return (
                'sampler ("vllm") with exact = true: vllm is vLLM as it comes now, and no trainer has its '
                'bits; set exact = false, or sampler = "vllm-zerokl", which is zerokl\'s decoder inside '
                'vLLM, or, on a GPU, "vllm-exact"'
            )
        if self.exact and self.sampler == "hf":
            return (
                'sampler ("hf") with exact = true: hf is transformers as it comes, and no trainer has its '
                'bits; set exact = false, or sampler = "native"'
            )
        min_p = self.sampling.min_p or self.perturb.min_p
        if self.sampler == "hf" and (min_p or self.sampling.sampling_params.changes_logits):
            return (
                'sampler ("hf") with sampling.min_p, logit_bias or allowed_token_ids, or with perturb.min_p: '
                "transformers applies min_p after top_p, and has the other two in another form; leave them "
                "out, or set another sampler"
            )
        if self.sampler == "vllm-exact" and run.device == "cpu":
            return (
                'sampler ("vllm-exact") needs a GPU: vLLM\'s kernels for CPUs are not batch-invariant; '
                'set sampler = "vllm-zerokl"'
            )
        is_for_cpus = (run.vllm or "").endswith("+cpu")
        if self.sampler.startswith("vllm") and run.device == "cuda" and is_for_cpus:
            return (
                f'sampler ("{self.sampler}"): the vLLM installed here computes on CPUs only; '
                'set device = "cpu"'
            )
        if run.ranks > 1 and self.sampler == "hf":
            return (
                f'ranks ({run.ranks}) with sampler "hf": transformers draws a whole batch with one '
                "generator, so tokens would depend on the number of ranks; start one process, or set another "
                "sampler"
            )

    max_staleness: int = setting(
        0, ge=0, also_called="max_off_policy_steps async_level max_async_level", needs_whole=bool
    )
    """Updates by which the sampler's weights may be older than the trainer's."""
    staleness_schedule: Literal["periodic", "lagged"] = setting("periodic", head=WHERE_SET)
    """Which older weights draw, with max_staleness above 0. periodic: the sampler keeps its weights, and
    renews them before they become older than allowed. lagged: each step draws with the weights that the step
    max_staleness / updates_per_rollout steps before it began with, and the first steps with the first
    weights. So later steps can be drawn while the trainer trains (pool.engine).
    """

    @rule
    def _late_by_whole_steps(self, run: PlannedRun) -> str | None:
        whole = self.max_staleness and self.max_staleness % self.updates_per_rollout == 0
        if self.staleness_schedule == "lagged" and not whole:
            return (
                f'staleness_schedule ("lagged") counts whole steps: max_staleness ({self.max_staleness}) '
                f"must be above 0, and a multiple of updates_per_rollout ({self.updates_per_rollout})"
            )

    tracking: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = setting(
        ("tensorboard",),
        head=free("decides only where the metrics are written as well"),
        common=True,
        also_called="report_to logger log_with use_wandb",
    )
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
    memory: MemoryConfig = MemoryConfig()
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


# Settings that are tables of keys which zerokl does not define.
FREE_SECTIONS = tuple(key for key, s in settings_of(Config).items() if get_origin(s.field.annotation) is dict)
