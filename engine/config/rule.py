"""A row of the tables that say which settings go together, and what a row looks at."""

from collections.abc import Callable
from typing import NamedTuple

from .run_config import Config
from .sampler_names import EXTERNAL


class Setting(NamedTuple):
    """What the rows of the table look at."""

    config: Config
    device: str | None = None  # "cpu" or "cuda"; None: not known yet
    # The version of vLLM; it ends with "+cpu" for a build for CPUs. None: not known yet, or not installed.
    vllm: str | None = None
    ranks: int = 1

    @property
    def vllm_exact(self) -> bool:
        """Whether vLLM samples with its own model in batch-invariant mode."""
        return self.config.sampler == "vllm-exact"

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM samples: as it comes, batch-invariant, or with our decoder."""
        return self.config.sampler.startswith("vllm")

    @property
    def keyed_vllm(self) -> bool:
        """Whether vLLM draws with zerokl's keys, over the trainer's own weights."""
        return self.config.sampler in ("vllm-exact", "vllm-zerokl")

    @property
    def external(self) -> bool:
        """Whether an engine as it comes samples: hf or vllm."""
        return self.config.sampler in EXTERNAL

    def any_other(self, *dtypes: str) -> bool:
        """Whether one of these settings of precision, of the trainer or of the sampler, is not "compute"."""
        sides = self.config.precision, self.config.precision.of_sampler
        return any(getattr(side, name) != "compute" for side in sides for name in dtypes)

    @property
    def vllm_on_cpu(self) -> bool:
        """Whether the installed vLLM computes on CPUs only."""
        return self.vllm is not None and self.vllm.endswith("+cpu")

    @property
    def given(self) -> bool:
        """Whether the loss trains on tokens that nobody drew."""
        return self.config.loss.advantage in ("dpo", "verifree")

    @property
    def separate(self) -> bool:
        """Whether the settings ask for a sampler with weights or numerics of its own."""
        c = self.config
        return bool(c.max_staleness or c.perturb.any or c.precision.of_sampler != c.precision)

    def _not_sharded(self) -> dict[str, bool]:
        """What FSDP does not go with here, by the name of the setting; whether it is set."""
        c = self.config
        return {
            f'sampler ("{c.sampler}")': c.sampler != "native",
            f'pool.engine ("{c.pool.engine}")': bool(c.pool.engine),
            "max_staleness": bool(c.max_staleness),
            f'precision.weights ("{c.precision.weights}")': bool(c.precision.weights),
            'perturb.routing ("replayed")': c.perturb.routing == "replayed",
            "perturb.* and precision.sampler_*": self.separate or c.precision.sampler_differs,
            f"workers ({c.workers})": c.workers > 1,
            f"shards_in_flight ({c.shards_in_flight})": c.shards_in_flight > 1,
            f"monitor.gradient ({c.monitor.gradient})": bool(c.monitor.gradient),
        }

    @property
    def not_sharded(self) -> str:
        """The first setting that FSDP does not go with; empty where it is not asked for, or goes."""
        if self.config.parallel.engine != "fsdp":
            return ""
        return next((name for name, is_set in self._not_sharded().items() if is_set), "")


class Rule(NamedTuple):
    """One row. `refused`: whether a Setting is refused. `message`: why, and what to do instead."""

    refused: Callable[[Setting], bool]
    message: Callable[[Setting], str]
