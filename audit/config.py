"""What an audit is asked to compare, and which of it cannot be compared."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..kernels.sampling_params import SamplingParams
from ..model.checkpoint import DTYPES
from .conclusion.outcome import NO_TOLERANCES, Tolerances
from .figures.batch_invariance import check_requests

SAMPLERS = ("native", "hf", "hf-eager", "vllm", "vllm-zerokl")
TRAINERS = ("zerokl", "hf", "hf-eager", "vllm")


@dataclass(frozen=True)
class AuditConfig:
    """What to compare. A dtype that is empty is the dtype named in its comment."""

    model: str  # of both engines; of the sampler alone where trainer_model is given
    sampler: str = "native"  # one of SAMPLERS, or the path of a log (logs.py)
    trainer: str = "zerokl"  # one of TRAINERS
    dtype: str = "bfloat16"
    sampler_dtype: str = ""  # of the sampler, where it differs from dtype
    head_dtype: str = ""  # of the logits, where it differs from the compute dtype
    sampler_head_dtype: str = ""  # of the sampler's logits, where it differs from head_dtype
    prompts: str = ""  # a text file with one prompt a line
    n: int = 64
    max_tokens: int = 256
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    # Whether these parameters were asked for. A log that says none takes them then.
    sampling_params_given: bool = False
    seed: int = 0
    weight_version: int | None = None  # takes only those rollouts of a log that have this version
    # Of every engine: "cpu", "cuda" or "auto". "auto" is a GPU where there is one, and where vLLM, if it is
    # asked for, can use it.
    device: str = "auto"
    format: str = "auto"  # of the log: a name in formats/registry.py
    trainer_model: str = ""  # the trainer's, where the audit compares two checkpoints
    checkpoints: tuple[str, ...] = ()  # of a log: other weights that may have drawn it
    full: bool = False  # whether the log-probabilities of the whole vocabulary are compared, too
    chat: bool = False  # whether prompts go through the tokenizer's chat template
    against: str = ""  # an earlier audit (its folder or audit.json) to compare settings and figures with
    tolerances: Tolerances = NO_TOLERANCES  # what the two sides may differ by
    own: int = 0  # requests at once with which the sampler is compared with itself; 0 does not

    def dtypes(self) -> dict[str, str]:
        """Compute dtype and dtype of the logits: of the trainer, then of the sampler."""
        sampler = self.sampler_dtype or self.dtype
        return {
            "dtype": self.dtype,
            "head_dtype": self.head_dtype or self.dtype,
            "sampler_dtype": sampler,
            "sampler_head_dtype": self.sampler_head_dtype or self.head_dtype or sampler,
        }


def check(cfg: AuditConfig) -> None:
    """Raise ValueError for a pair that cannot be compared."""
    if cfg.sampler not in SAMPLERS and not Path(cfg.sampler).exists():
        raise ValueError(
            f"audit: sampler {cfg.sampler} is no file; "
            f"choose {', '.join(SAMPLERS)}, or name a log of rollouts"
        )
    if cfg.trainer not in TRAINERS:
        raise ValueError(f"audit: trainer {cfg.trainer} is not known; choose {', '.join(TRAINERS)}")
    for name, low, high in (("n", 1, 1 << 20), ("max_tokens", 1, 1 << 20), ("seed", 0, (1 << 32) - 1)):
        if not low <= getattr(cfg, name) <= high:
            raise ValueError(f"audit: {name} ({getattr(cfg, name)}) must lie in {low} to {high}")
    cfg.sampling_params.check()
    cfg.tolerances.check()
    check_requests(cfg.own, of_log=cfg.sampler not in SAMPLERS)
    if cfg.checkpoints and cfg.sampler in SAMPLERS:
        raise ValueError("audit: --checkpoints says which weights may have drawn a log; name a log")
    if cfg.weight_version is not None and cfg.sampler in SAMPLERS:
        raise ValueError(
            "audit: --weight_version chooses among the rollouts of a log; "
            "an engine draws with the model's weights"
        )
    if cfg.full and cfg.sampler not in SAMPLERS:
        raise ValueError("audit: --full needs an engine as sampler; a log holds the drawn tokens only")
    dtype, head, *sampler_dtypes = map(dtype_of, cfg.dtypes().values())
    if cfg.trainer_model and cfg.sampler not in SAMPLERS:
        raise ValueError(
            "audit: a log was drawn elsewhere, so a second model has nothing to draw with; give the "
            "trainer's alone"
        )
    if cfg.sampler == cfg.trainer == "vllm" and cfg.trainer_model:
        raise ValueError(
            "audit: two checkpoints in vLLM would be two engines in one process; audit each with zerokl"
        )
    if cfg.sampler == cfg.trainer == "vllm" and sampler_dtypes != [dtype, head]:
        raise ValueError(
            "audit: vLLM in two dtypes would be two engines in one process; audit each of them against zerokl"
        )


def dtype_of(name: str) -> torch.dtype:
    """The dtype that an option names. Raises ValueError for an unknown one."""
    if name not in DTYPES:
        raise ValueError(f"audit: dtype {name} is not known; choose {', '.join(DTYPES)}")
    return DTYPES[name]
