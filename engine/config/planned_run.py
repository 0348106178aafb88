"""What a rule looks at beside its section: the whole configuration, and what is known of the machine."""

from typing import Any, NamedTuple

from .sampler_names import EXTERNAL


class PlannedRun(NamedTuple):
    """A configuration and where it is to run. What is not known yet refuses nothing."""

    config: Any  # a Config, whose sections import this file
    device: str | None = None  # "cpu" or "cuda"; None: not known yet
    # The version of vLLM; it ends with "+cpu" for a build for CPUs. None: not known yet, or not installed.
    vllm: str | None = None
    ranks: int = 1

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
