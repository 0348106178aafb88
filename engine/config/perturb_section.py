"""The section `perturb`: ways in which the sampler differs from the trainer (rollout/perturb.py)."""

from typing import Annotated, Literal

from .precision_section import KvQuantisationText, QuantisationText, ShortNames
from .section import WHERE_SET, PlannedRun, Section, Temperature, differing, rule, setting


class PerturbConfig(Section):
    """Mismatch on demand: ways in which the sampler differs from the trainer. Needs exact = false."""

    logit_noise: float = setting(0.0, ge=0, differs=True)
    """Standard deviation of the noise that is added to each logit, after the temperature."""

    @rule
    def _noise_on_our_draw(self, run: PlannedRun) -> str | None:
        if run.external and self.logit_noise > 0:
            return (
                f'perturb.logit_noise with sampler "{run.config.sampler}": an engine as it comes has a draw '
                "of its own; set logit_noise = 0, or another sampler"
            )

    round_weights: Annotated[
        Literal["", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"], ShortNames
    ] = setting("", differs=True)
    """The sampler's weights are rounded to this dtype."""

    @rule
    def _one_rounding_of_weights(self, run: PlannedRun) -> str | None:
        if self.round_weights and (self.weights or run.config.precision.weights):
            return (
                f'perturb.round_weights ("{self.round_weights}") with perturb.weights or precision.weights: '
                "each rounds the sampler's weights; leave one out"
            )

    weights: QuantisationText = setting("", head=WHERE_SET, differs=True)
    """The sampler's weights are quantised as with precision.weights, which is then the trainer's alone."""
    weights_of: Literal["masters", "compute"] = setting("masters", head=WHERE_SET)
    """What is quantised: the fp32 master weights, or their export in the sampler's compute dtype."""
    gain: float = setting(1.0, ge=0)
    """Factor on the difference that round_weights or weights makes."""
    temperature: Temperature = setting(0.0, ge=0, differs=True)
    """Temperature of the sampler; 0 is the trainer's."""
    top_k: int = setting(0, ge=0, head=WHERE_SET, differs=True)
    """top_k of the sampler in place of sampling.top_k; 0 is the trainer's. The trainer does not know of the
    cut. The sampler's logprobs are those of the distribution that is left, as vLLM's processed logprobs.
    """
    top_p: float = setting(0.0, ge=0, le=1, head=WHERE_SET, differs=True)
    """The same of top_p; 0 is the trainer's, and 1 keeps all tokens."""
    min_p: float = setting(0.0, ge=0, le=1, head=WHERE_SET, differs=True)
    """The same of min_p; 0 is the trainer's."""
    kv: KvQuantisationText = setting("", head=WHERE_SET, differs=True)
    """The sampler's keys and values are quantised as with precision.kv, which is then the trainer's alone."""

    @rule
    def _a_cache_of_ours(self, run: PlannedRun) -> str | None:
        if run.external and self.kv:
            return (
                f'perturb.kv ("{self.kv}") with sampler "{run.config.sampler}": an engine as it comes has a '
                "cache of its own; leave it out, or set another sampler"
            )

    delay: int = setting(0, ge=0, differs=True)
    """Steps by which the sampler's weights are late. Its rollouts name the current version all the same."""

    @rule
    def _late_once(self, run: PlannedRun) -> str | None:
        if run.config.staleness_schedule == "lagged" and self.delay > 0:
            return 'perturb.delay with staleness_schedule = "lagged": both make weights late; leave one out'

    routing: Literal["free", "replayed"] = setting(
        "free", head=WHERE_SET, needs_experts=True, needs_whole=lambda value: value == "replayed"
    )
    """Of a mixture of experts: free is the trainer's own choice of experts. With replayed the trainer
    computes each token, of prompts too, with the experts that the sampler chose, and takes their weights from
    its own router (R3, arXiv 2510.11370). Any sampler names them. It may go with exact = true, and then
    changes no bit.
    """

    @rule
    def _routing(self, run: PlannedRun) -> str | None:
        if self.routing == "replayed" and run.config.loss.trains_given:
            return (
                'perturb.routing ("replayed") needs a loss of drawn tokens, whose experts the sampler names; '
                'set it to "free", or choose another loss'
            )
        if self.routing == "replayed" and run.keyed_vllm and run.config.vllm.cuda_graphs:
            return (
                'perturb.routing ("replayed") with vllm.cuda_graphs: a graph of vLLM names no experts; set '
                'vllm.cuda_graphs = false, or routing = "free"'
            )

    @property
    def any(self) -> bool:
        """Whether the sampler differs from the trainer in any of these ways."""
        return differing(self)

    @property
    def sampling_changes(self) -> dict[str, float]:
        """The fields of SamplingParams that the sampler has for itself, with their values."""
        values = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return {name: value for name, value in values.items() if value}
