"""What an audit is asked to compare, and which of it cannot be compared.

The text under a field gives its meaning and unit. `zerokl audit --help` and docs/commands.md show it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from ..engine.config import sampler_names
from ..engine.config.section import Section
from ..kernels.sampling_params import SamplingParams
from .conclusion.outcome import Tolerances
from .figures.bands import BANDS, GATES
from .frameworks import NAMES
from .settings import Dtypes

# Names that an audit does not take, and why.
_NO_SAMPLER = {
    "vllm-exact": "only train draws with it, and compares all its tokens; to audit vLLM in batch-invariant "
    "mode, set VLLM_BATCH_INVARIANT=1 and take vllm",
}
_NO_TRAINER = {
    "native": "it only draws; its forward is zerokl",
    "vllm-exact": "only train draws with it, and it scores nothing",
    "vllm-zerokl": "it only draws; its forward is zerokl",
}
# The engines of an audit: those that draw, and those that score.
SAMPLERS = {name: line for name, line in sampler_names.SAMPLERS.items() if name not in _NO_SAMPLER} | {
    "hf-eager": "hf with eager attention; hf has sdpa"
}
TRAINERS = {
    "zerokl": "the forward that zerokl trains with",
    "hf": "the forward of transformers, with sdpa attention",
    "hf-eager": "the same with eager attention",
    "vllm": "the prompt log-probabilities of vLLM as it comes",
}
Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LogFormat = Literal[("auto", *NAMES)]
Band = Literal[(*BANDS, *GATES)]
DTYPES = ("float32", "bfloat16", "float16")
# Completions that engines draw, or that a model scores, where nothing else is asked for.
COMPLETIONS = 64
# Requests at once with which a sampler is compared with itself, at most.
_MOST_REQUESTS = 256


class AuditSettings(Section):
    """What to compare, and how. A setting that is not given has the value that its text names."""

    model: str = ""
    """The model that scores a log; by default the log's own trainer column is compared."""
    format: LogFormat = "auto"
    """Which framework wrote the log; auto looks at its first row."""
    sampler: str = Field(
        "native",
        description=f"{sampler_names.listed(SAMPLERS)}; or a JSONL file of rollouts, or "
        "the address of a running SGLang server (http://...).",
    )
    trainer: str = Field(
        "zerokl",
        description=f"{sampler_names.listed(TRAINERS)}; or a model's folder, with which hf scores. A log of "
        "a family that zerokl has no decoder of is scored by hf, where none is named.",
    )
    dtype: Dtype = "bfloat16"
    """Compute dtype."""
    sampler_dtype: str = ""
    """Compute dtype of the sampler; by default the same."""
    head_dtype: str = ""
    """Dtype of the logits; by default the compute dtype."""
    sampler_head_dtype: str = ""
    """Dtype of the sampler's logits; by default head_dtype."""
    prompts: str = ""
    """Text file with one prompt in each line; by default sums such as 3+14=."""
    chat: bool = False
    """Put each prompt into the tokenizer's chat template, as a user's turn."""
    max_tokens: int = 256
    """Tokens of a completion at most."""
    temperature: float | None = None
    """Temperature, by default 1; 0 is greedy. Of a log that says none, what it was drawn with."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0, the default, keeps all."""
    top_p: float | None = None
    """Keep the most likely tokens until their probabilities together reach this; 1, the default, keeps
    all.
    """
    min_p: float | None = None
    """Keep the tokens with at least this share of the largest probability; 0, the default, keeps all."""
    seed: int = 0
    """Seed of the draw."""
    weight_version: int | None = None
    """From a file of rollouts, take only those drawn with this version of the weights."""
    checkpoints: tuple[str, ...] = ()
    """Other weights that may have drawn a log: a model, or a folder of models such as a run's checkpoints.
    May be given several times.
    """
    adapter: tuple[str, ...] = ()
    """The LoRA adapter, a folder of PEFT, that is merged into the model that scores a log: which fault of the
    adapter drew the log? Others that may have drawn it follow, each a folder of PEFT, or a folder of such.
    """
    knobs: bool = False
    """Fit a number at every operation of the model to each column of a log, whatever fits it already.
    Without it they are tried where no hypothesis leaves rounding alone.
    """
    full_vocab: bool = False
    """Compare the log-probabilities of the whole vocabulary at each place, too: the KL both ways, total
    variation, ranks.
    """
    batch_invariance: int = 0
    """Requests at once, up to 256, with which the sampler is compared with itself: drawn alone, 2, 4, 8 and
    so on at once, again, with its caches dropped, and beside long prefills. 0 does not.
    """
    against: str = ""
    """An earlier audit, its folder or audit.json: which of the engines' settings and versions have changed
    since, and how far the figures have.
    """
    device: Device = "auto"
    """Where all engines compute; auto is a GPU where there is one, and where vLLM, if it is asked for, can
    use it.
    """
    max_k3: float | None = None
    """Tolerance: k3 may be at most this, in nats a token."""
    max_abs: float | None = None
    """Tolerance: no log-probability may differ by more than this."""
    band: Band | None = None
    """Tolerance: the geometric mean ratio of every sequence lies in 0.999 to 1.002 (strict), or within 1% or
    5% of 1; or the figure that a project gates on lies within that project's bound.
    """

    @property
    def dtypes(self) -> Dtypes:
        """Compute dtype and dtype of the logits, of the trainer and of the sampler."""
        sampler = self.sampler_dtype or self.dtype
        return Dtypes(
            self.dtype,
            self.head_dtype or self.dtype,
            sampler,
            self.sampler_head_dtype or self.head_dtype or sampler,
        )

    @property
    def given_params(self) -> SamplingParams | None:
        """The sampling parameters, where any was given. A log that says none takes them then."""
        options = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        options["min_p"] = self.min_p
        given = {name: value for name, value in options.items() if value is not None}
        return SamplingParams(**given) if given else None

    @property
    def sampling_params(self) -> SamplingParams:
        """The sampling parameters: those given, and the defaults."""
        return self.given_params or SamplingParams()

    @property
    def tolerances(self) -> Tolerances:
        """What the two sides may differ by."""
        return Tolerances(self.max_k3, self.max_abs, self.band)


class AuditConfig(AuditSettings):
    """An audit in which a model computes. Its sampler is an engine, or a log that the trainer scores."""

    model: str
    """Of both engines; of the sampler alone where trainer_model is given."""
    trainer_model: str = ""
    """The trainer's, where the audit compares two checkpoints."""
    n: int = COMPLETIONS
    """Completions to compare."""

    @property
    def reads_log(self) -> bool:
        """Whether the sampler is a log."""
        return self.sampler not in SAMPLERS


def check(cfg: AuditConfig) -> None:
    """Raise ValueError for a pair that cannot be compared."""
    if cfg.reads_log and not Path(cfg.sampler).exists():
        refusal = _refusal(cfg.sampler, _NO_SAMPLER, "is no file")
        raise ValueError(
            f"audit: sampler {cfg.sampler} {refusal}; choose {', '.join(SAMPLERS)}, or name a log of rollouts"
        )
    if cfg.trainer not in TRAINERS:
        refusal = _refusal(cfg.trainer, _NO_TRAINER, "is not known")
        raise ValueError(f"audit: trainer {cfg.trainer} {refusal}; choose {', '.join(TRAINERS)}")
    check_draw(cfg, "audit")
    cfg.tolerances.check()
    check_requests(cfg.batch_invariance, cfg.reads_log)
    for name in vars(cfg.dtypes).values():
        if name not in DTYPES:
            raise ValueError(f"audit: dtype {name} is not known; choose {', '.join(DTYPES)}")
    _check_for_sampler(cfg)
    _check_vllm(cfg)


def check_draw(cfg: AuditConfig, command: str) -> None:
    """Raise ValueError for numbers with which nothing can be drawn. command: it begins the message."""
    for name, low, high in (("n", 1, 1 << 20), ("max_tokens", 1, 1 << 20), ("seed", 0, (1 << 32) - 1)):
        if not low <= getattr(cfg, name) <= high:
            raise ValueError(f"{command}: {name} ({getattr(cfg, name)}) must lie in {low} to {high}")
    cfg.sampling_params.check()


def _refusal(name: str, reasons: Mapping[str, str], otherwise: str) -> str:
    """Why an audit does not take the engine `name`, as the end of a message about the name."""
    if name in reasons:
        return f"cannot be audited: {reasons[name]}"
    return sampler_names.RENAMED.get(name, otherwise)


def check_requests(requests: int, reads_log: bool) -> None:
    """Raise ValueError where batch invariance cannot be asked for. requests: 0 does not ask for it."""
    if requests and reads_log:
        raise ValueError(
            "audit: --batch_invariance compares a sampler with itself, and a log cannot draw again"
        )
    if requests and not 2 <= requests <= _MOST_REQUESTS:
        raise ValueError(f"audit: batch_invariance ({requests}) must lie in 2 to {_MOST_REQUESTS}")


def _check_for_sampler(cfg: AuditConfig) -> None:
    """Raise ValueError for a setting that is not for this sampler: an engine, or a log."""
    if cfg.checkpoints and not cfg.reads_log:
        raise ValueError("audit: --checkpoints says which weights may have drawn a log; name a log")
    if cfg.adapter and not cfg.reads_log:
        raise ValueError("audit: --adapter says which adapter may have drawn a log; name a log")
    if cfg.weight_version is not None and not cfg.reads_log:
        raise ValueError(
            "audit: --weight_version chooses among the rollouts of a log; "
            "an engine draws with the model's weights"
        )
    if cfg.full_vocab and cfg.reads_log:
        raise ValueError("audit: --full_vocab needs an engine as sampler; a log holds the drawn tokens only")
    if cfg.trainer_model and cfg.reads_log:
        raise ValueError(
            "audit: a log was drawn elsewhere, so a second model has nothing to draw with; give the "
            "trainer's alone"
        )


def _check_vllm(cfg: AuditConfig) -> None:
    """Raise ValueError for two vLLM engines: a process holds one."""
    if not cfg.sampler == cfg.trainer == "vllm":
        return
    if cfg.trainer_model:
        raise ValueError(
            "audit: two checkpoints in vLLM would be two engines in one process; audit each with zerokl"
        )
    dtypes = cfg.dtypes
    if (dtypes.sampler_dtype, dtypes.sampler_head_dtype) != (dtypes.dtype, dtypes.head_dtype):
        raise ValueError(
            "audit: vLLM in two dtypes would be two engines in one process; audit each of them against zerokl"
        )
