"""The section `perturb`: ways in which the sampler differs from the trainer (rollout/perturb.py)."""

from typing import Annotated, Literal

from pydantic import Field

from .precision_section import KvQuantisationText, QuantisationText, ShortNames
from .section import Section, Temperature


class PerturbConfig(Section):
    """Mismatch on demand: ways in which the sampler differs from the trainer. Needs exact = false."""

    logit_noise: float = Field(0.0, ge=0)
    """Standard deviation of the noise that is added to each logit, after the temperature."""
    round_weights: Annotated[
        Literal["", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"], ShortNames
    ] = ""
    """The sampler's weights are rounded to this dtype."""
    weights: QuantisationText = ""
    """The sampler's weights are quantised as with precision.weights, which is then the trainer's alone."""
    weights_of: Literal["masters", "compute"] = "masters"
    """What is quantised: the fp32 master weights, or their export in the sampler's compute dtype."""
    gain: float = Field(1.0, ge=0)
    """Factor on the difference that round_weights or weights makes."""
    temperature: Temperature = Field(0.0, ge=0)
    """Temperature of the sampler; 0 is the trainer's."""
    top_k: int = Field(0, ge=0)
    """top_k of the sampler in place of sampling.top_k; 0 is the trainer's. The trainer does not know of the
    cut. The sampler's logprobs are those of the distribution that is left, as vLLM's processed logprobs.
    """
    top_p: float = Field(0.0, ge=0, le=1)
    """The same of top_p; 0 is the trainer's, and 1 keeps all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    """The same of min_p; 0 is the trainer's."""
    kv: KvQuantisationText = ""
    """The sampler's keys and values are quantised as with precision.kv, which is then the trainer's alone."""
    delay: int = Field(0, ge=0)
    """Steps by which the sampler's weights are late. Its rollouts name the current version all the same."""
    routing: Literal["free", "replayed"] = "free"
    """Of a mixture of experts: free is the trainer's own choice of experts. With replayed the trainer
    computes each token, of prompts too, with the experts that the sampler chose, and takes their weights from
    its own router (R3, arXiv 2510.11370). Any sampler names them. It may go with exact = true, and then
    changes no bit.
    """

    @property
    def any(self) -> bool:
        """Whether the sampler differs from the trainer in any of these ways."""
        of_weights = self.round_weights or self.weights or self.delay
        return bool(self.logit_noise or of_weights or self.kv or self.sampling_changes)

    @property
    def sampling_changes(self) -> dict[str, float]:
        """The fields of SamplingParams that the sampler has for itself, with their values."""
        values = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return {name: value for name, value in values.items() if value}
