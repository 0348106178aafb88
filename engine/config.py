"""The configuration of a run: frozen models, TOML files, presets and dotted overrides. Unknown keys are errors.

Every field is followed by a line that gives its meaning and unit.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..kernels.logprob import Distribution
from ..model.decoder import COMPUTE
from .loss import LossConfig
from .mismatch import MismatchConfig
from .precision import PrecisionConfig


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TaskConfig(_Section):
    """What is learnt."""

    name: str = "add"
    """add, sort, countdown, jsonl, or your own task as module:object."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task, e.g. { max_value = 99, train = 512, held_out = 256 } for add."""
    reward: str = ""
    """Your own reward as module:function(problem, completion) -> float; empty is the task's own."""
    perfectible_only: bool = True
    """Train on the task's problems that `zerokl init` found solved sometimes but not always, where the model folder names any."""
    problems: int = Field(0, ge=0)
    """Train on that many of them at most, the first; 0 is all."""


class SamplingConfig(_Section):
    """How completions are drawn."""

    temperature: float = Field(1.0, gt=0)
    """Temperature of the softmax. 0 (greedy) is refused: a policy without randomness has no policy gradient."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most likely tokens that reach this probability; 1 keeps all."""
    max_tokens: int = Field(16, ge=1)
    """Completion tokens at most, the end-of-sequence token included."""

    @property
    def distribution(self) -> Distribution:
        """The same as the kernels know it."""
        return Distribution(self.temperature, self.top_k, self.top_p)


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
    samples: int = Field(1, ge=1)
    """Completions of each problem."""
    temperature: float = Field(0.0, ge=0)
    """Temperature; 0 is greedy. top_k and top_p are those of sampling."""


class CheckpointConfig(_Section):
    """Checkpoints in Hugging Face format with the fp32 master weights, and what a resumed run needs. The last step always has one."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0 keeps only the last."""
    keep: int = Field(0, ge=0)
    """Newest checkpoints to keep; 0 keeps all."""


class LedgerConfig(_Section):
    """The run's ledger: hashes of all that a step computes."""

    detail: Literal["roots", "gradients", "full"] = "full"
    """What has a hash of each weight written down: nothing, the gradients, or optimizer state and weights as well. Costs space only."""
    state_every: int = Field(1, ge=1)
    """Steps between hashes of optimizer state and weights. More saves time with a large model; part of the run's fingerprint."""


class Config(_Section):
    """A training run."""

    model: str = "init:tiny"
    """Model folder, hub name (owner/name), or init:PRESET to make a base model for the task as `zerokl init` does."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Compute dtype of sampler and trainer. Master weights and optimizer state are fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where sampler and trainer compute; auto is a CUDA GPU where there is one (and vLLM, if it samples, is not its build for CPUs).
    Changes the bits: a GPU's kernels sum in another order than the reference on a CPU."""
    seed: int = Field(0, ge=0, lt=1 << 32)
    """Seed of the run: problem order and every token drawn."""
    steps: int = Field(100, ge=1)
    """Training steps."""
    prompts: int = Field(16, ge=1)
    """Prompts of a step (P)."""
    samples: int = Field(8, ge=1)
    """Completions of each prompt (G)."""
    micro_batch: int = Field(16, ge=1)
    """Sequences of one forward and backward, in each worker. Bounds memory; changes no bit."""
    virtual_shards: int = Field(8, ge=1, le=1 << 16)
    """Parts into which a step's sequences are cut; a power of two. The order of the gradient's sum."""
    updates_per_rollout: int = Field(1, ge=1)
    """Optimizer updates on each step's rollouts. loss and entropy are those of the first, grad_norm and lr of the last."""
    exact: bool = True
    """Stop at the first token whose trainer logprob is not bit for bit its sampler logprob."""
    threads: int = Field(0, ge=0, le=1 << 16)
    """CPU threads; 0 leaves torch's choice. Changes no bit."""
    workers: int = Field(0, ge=0, le=1 << 16)
    """Processes that sample and train side by side, each on its share of the threads, rounded down to a power of two; 0 chooses by
    model size. Changes no bit."""
    sampler: Literal["native", "vllm", "hf", "vllm-stock"] = "native"
    """Which engine draws the completions: zerokl's own, or vLLM (in an environment that has it) with our decoder; they draw the same
    tokens. On a GPU also vLLM with its own model in batch-invariant mode (vllm-stock), whose arithmetic our kernels follow. Or, with
    exact = false, a foreign one: transformers' generate (hf), or vLLM as it comes (vllm-stock)."""
    max_staleness: int = Field(0, ge=0)
    """Updates by which the weights sampled from may be older than the trainer's; they are renewed when they would be older."""
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()
    precision: PrecisionConfig = PrecisionConfig()
    mismatch: MismatchConfig = MismatchConfig()
    native: NativeConfig = NativeConfig()
    vllm: VllmConfig = VllmConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ledger: LedgerConfig = LedgerConfig()

    @property
    def samples_older_weights(self) -> bool:
        """Whether the sampler keeps weights that no checkpoint of the trainer holds: such a run is done again from its first step only."""
        return bool(self.max_staleness or self.mismatch.delay)

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.virtual_shards & (self.virtual_shards - 1):
            raise ValueError(f"virtual_shards ({self.virtual_shards}) must be a power of two")
        if self.samples == 1 and self.loss.resolve().advantage != "batch":
            raise ValueError(
                'samples (1) must be at least 2: the advantage compares samples of one prompt (or set loss.advantage = "batch")'
            )
        if self.exact and (self.precision.sampler_differs or self.mismatch.any or self.sampler == "hf"):
            raise ValueError("precision.sampler_*, mismatch.* and a foreign sampler make sampler and trainer differ; set exact = false")
        if self.exact and self.sampler == "vllm-stock" and self.precision.numerics() != COMPUTE:
            raise ValueError('precision.head_dtype and cache_dtype: vLLM\'s own model has other kernels for them; set both to "compute"')
        apart = self.max_staleness or self.mismatch.any or self.precision.numerics(sampler=True) != self.precision.numerics()
        if self.sampler != "native" and apart:
            raise ValueError(f'max_staleness, mismatch.* and precision.sampler_*_dtype need sampler = "native", not {self.sampler}')
        if self.sampler == "vllm" and self.precision.numerics().cache is not None:
            raise ValueError('precision.cache_dtype: vLLM\'s cache holds the compute dtype; set it to "compute", or sampler = "native"')
        if self.prompts * self.samples < 2:
            raise ValueError("prompts x samples must be at least 2")
        return self


# Sections whose keys are not ours.
_FREE = ("task.options", "vllm.engine")


def load_config(file: str | None, preset: str | None, overrides: Mapping[str, str]) -> Config:
    """A TOML file or a preset, then dotted overrides such as {"optimizer.lr": "3e-4"}.

    Raises ValueError, one line, for a file that cannot be read, an unknown key (naming the nearest) or a bad value.
    """
    if file is not None and preset is not None:
        raise ValueError("config: give a file or --preset, not both")
    values = _read(file, preset)
    known = dict(_keys(Config))
    for key, text in overrides.items():
        *path, last = key.split(".")
        _known_or_error(key, known)
        target = values
        for part in path:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ValueError(f"config: {key}: {part} is {target!r}, not a section")
        target[last] = _value(text, known.get(key, Any))
    for key in _flatten(values):
        _known_or_error(key, known)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(p) for p in first["loc"])
        given = f" ({first['input']!r})" if place and not isinstance(first["input"], dict) else ""
        said = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"config: {place}{given}: {said}" if place else f"config: {said}") from None


def preset_names() -> list[str]:
    """The presets that come with zerokl."""
    return sorted(f.name.removesuffix(".toml") for f in resources.files("zerokl.engine.presets").iterdir() if f.name.endswith(".toml"))


def _read(file: str | None, preset: str | None) -> dict[str, Any]:
    if file is None and preset is None:
        return {}
    try:
        if preset is not None:
            if preset not in preset_names():
                raise ValueError(f"config: preset {preset} is not known; choose {', '.join(preset_names())}")
            return tomllib.loads(resources.files("zerokl.engine.presets").joinpath(f"{preset}.toml").read_text())
        return tomllib.loads(Path(str(file)).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config: {file} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"config: {file} is not valid TOML ({error})") from None


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key and its type. A section is a key as well."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        yield prefix + name, kind
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, Mapping) and prefix + name not in _FREE:
            yield from _flatten(value, f"{prefix}{name}.")


def _known_or_error(key: str, known: Mapping[str, Any]) -> None:
    if key in known or key.startswith(tuple(f"{free}." for free in _FREE)):
        return
    last, by_last = key.rsplit(".", 1)[-1], {k.rsplit(".", 1)[-1]: k for k in reversed(known)}
    near = [by_last[last]] if last in by_last else difflib.get_close_matches(key, known, 1)
    near = near or [by_last[m] for m in difflib.get_close_matches(last, by_last, 1)]
    hint = f"; did you mean {near[0]}?" if near else f"; keys are {', '.join(k for k in known if '.' not in k)}"
    raise ValueError(f"config: unknown key {key}{hint}")


def _value(text: str, kind: Any) -> Any:
    """A command-line word as the TOML value it looks like; text for keys whose type is text."""
    if kind is str or (get_args(kind) and all(isinstance(a, str) for a in get_args(kind))):
        return text
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def overrides_from(values: Mapping[str, Any]) -> dict[str, str]:
    """TOML values of dotted keys as load_config takes them."""
    return {key: value if isinstance(value, str) else _toml(value) for key, value in values.items()}


def to_toml(config: Config) -> str:
    """The whole resolved configuration as TOML."""
    values = config.model_dump() | {"loss": config.loss.resolve().model_dump()}
    lines: list[str] = []

    def table(values: Mapping[str, Any], path: Sequence[str]) -> None:
        if path:
            lines.append(f"\n[{'.'.join(map(_toml_key, path))}]")
        lines.extend(f"{_toml_key(k)} = {_toml(v)}" for k, v in values.items() if not isinstance(v, Mapping) and v is not None)
        for k, v in values.items():
            if isinstance(v, Mapping):
                table(v, [*path, k])

    table(values, [])
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # strings, booleans and integers are written alike in JSON and TOML
