"""The configuration's section `init`: the base model that model = "init:PRESET", or `zerokl init`, makes."""

from typing import Annotated

from pydantic import Field, model_validator

from .section import Section, free

Share = Annotated[float, Field(ge=0, le=1)]
# The sizes that init.sizes may name, as a checkpoint's config.json names them.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


class InitSettings(Section):
    """How a base model is made for a task, and its perfectible set chosen."""

    target: float = Field(0.5, gt=0, lt=1)
    """Mean reward of one sampled completion of each training problem at which the warm start ends."""
    solved: tuple[Share, Share] = (0.2, 0.8)
    """Bounds of the perfectible set: the mean reward of the attempts at one of its problems. 0.2 and 0.8 are
    those of arXiv:2510.26788.
    """
    problems: int = Field(128, ge=1, le=1_000_000)
    """Problems of the perfectible set at most."""
    attempts: int = Field(16, ge=1, le=4096)
    """Completions of each problem that are drawn to choose them."""
    sizes: dict[str, int] = Field(default_factory=dict)
    """Sizes that differ from those of the preset, such as { hidden_size = 64, num_hidden_layers = 2 }."""

    @model_validator(mode="after")
    def _can_be_made(self) -> "InitSettings":
        if self.solved[0] > self.solved[1]:
            raise ValueError(f"init.solved {list(self.solved)}: the first bound must not be above the second")
        for name, size in self.sizes.items():
            if name not in SIZES:
                raise ValueError(f"init.sizes: {name[:100]} is not known; sizes are {', '.join(SIZES)}")
            if not 1 <= size <= 1 << 20:
                raise ValueError(f"init.sizes: {name} ({size}) must be at least 1 and at most {1 << 20}")
        return self


class InitConfig(
    InitSettings,
    head=free("how a base model is made; the weights and the problems found there are chained instead"),
):
    """The base model that model = "init:PRESET" makes for the task, and its perfectible set."""

    seed: int = Field(-1, ge=-1)
    """Seed of the base model, of its first weights and of the order of its examples; -1 is the run's seed."""

    def seed_of(self, run: int) -> int:
        """The seed of the base model of a run with this seed."""
        return run if self.seed < 0 else self.seed

    @property
    def settings(self) -> InitSettings:
        """Without the seed."""
        return InitSettings(**self.model_dump(exclude={"seed"}))
