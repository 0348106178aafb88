"""The settings of LoRA: adapters are trained in place of the weights (model/adapters.py)."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ...model.lora import TARGETS, Lora
from .section import WHERE_SET, PlannedRun, Section, free, rule, setting

# Settings of PEFT's LoraConfig that zerokl does not have, by name: why, and what to do instead.
REFUSED = {
    "dropout": "the trainer would drop inputs that the sampler does not, so no logprob would be exact; "
    "adapters are trained without dropout: leave it out",
    "use_dora": "DoRA's division by a column norm is not built; leave it out",
    "use_rslora": "rank-stabilised LoRA has s = alpha / sqrt(rank); set lora.alpha to sqrt(rank) times "
    "yours, which gives the same s",
    "modules_to_save": "only adapters are trained, and all else is frozen; leave it out",
    "bias": "only adapters are trained, and biases are frozen; leave it out",
    "r": "the rank is called lora.rank",
    "lora_alpha": "it is called lora.alpha",
    "target_modules": "they are called lora.targets",
}
REFUSED["lora_dropout"] = REFUSED["dropout"]
# Why a sampler does not draw with adapters that are not merged.
_MERGED_ONLY = {
    "vllm-exact": "vLLM's own model adds adapters by its own kernels, in another order than the trainer's",
    "vllm": "it loads merged weights, with which this run does not compute",
}
_MERGED_ONLY["hf"] = _MERGED_ONLY["vllm"]
_NO_COPY = "it computes with a copy of the weights, to which no adapters go yet"


class LoraConfig(Section, head=WHERE_SET):
    """LoRA (Hu et al., arXiv:2106.09685): low-rank adapters are trained, and the model itself is frozen.

    docs/lora.md says what it computes and what memory it needs.
    """

    rank: int = setting(0, ge=0, le=4096, common=True)
    """Rank of the adapters; 0 is off, and every weight is trained."""
    alpha: float = Field(32.0, gt=0)
    """An adapter is scaled by alpha / rank before it is added to its weight."""
    targets: tuple[Literal[TARGETS], ...] = TARGETS  # type: ignore[valid-type]
    """The matrices of each layer that have an adapter. Embedding and lm_head have none."""
    merge: bool = True
    """Whether the adapters are merged into the weights that sampler and trainer compute with. If not, each
    product adds theirs, so that no update is lost in a rounding of the weights: docs/lora.md.
    """

    @rule
    def _unmerged(self, run: PlannedRun) -> str | None:
        c = run.config
        if not self.merge and c.sampler not in ("native", "vllm-zerokl"):
            return (
                f'lora.merge (false) with sampler ("{c.sampler}"): {_MERGED_ONLY[c.sampler]}; set sampler = '
                '"native" or "vllm-zerokl"'
            )
        if not self.merge and (c.pool.engine or c.max_staleness or c.perturb.any):
            return (
                f"lora.merge (false) with pool.engine, max_staleness or [perturb]: {_NO_COPY}; leave one out"
            )
        if not self.merge and c.precision.sampler_differs:
            return f"lora.merge (false) with a sampler's own precision: {_NO_COPY}; leave one out"

    adapter: str = setting("", head=free("a place; the first adapters found there are chained instead"))
    """Folder of a PEFT adapter to go on from; empty begins with an adapter that changes nothing. Its rank,
    alpha and targets must be those set here. The ledger chains its weights, not its place.
    """

    @property
    def shape(self) -> Lora | None:
        """What a run's adapters look like; None where LoRA is off."""
        return Lora(self.rank, self.alpha, self.targets, self.merge) if self.rank else None

    @field_validator("targets")
    @classmethod
    def _in_order(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        """Equal sets are equal settings, so that the ledger chains the same."""
        if not targets:
            raise ValueError("must name a matrix; without LoRA set lora.rank = 0")
        return tuple(name for name in TARGETS if name in targets)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        for name in REFUSED if isinstance(values, dict) else ():
            if name in values:
                raise ValueError(refusal(name))
        return values

    @model_validator(mode="after")
    def _on(self) -> "LoraConfig":
        if not self.rank and self != LoraConfig.model_construct():
            raise ValueError("lora.alpha, targets, merge and adapter need lora.rank; set it, 16 for example")
        return self


def refusal(name: str) -> str:
    """Why lora.`name`, a key of REFUSED, is refused."""
    return f"lora.{name} is refused: {REFUSED[name]}"
