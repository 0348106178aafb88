"""What an audit assumed: the settings, prompts and versions under which its figures hold."""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..files.installed import installed_version
from ..kernels.sampling_params import SamplingParams
from .as_json import OPTIONAL, PART

_PACKAGES = ("zerokl", "zerokl-audit", "torch", "transformers", "tokenizers", "vllm", "numpy")
# Different sampling parameters of a log that are listed.
_LISTED = 4


@dataclass(frozen=True)
class Dtypes:
    """Compute dtype and dtype of the logits, of trainer and sampler; "logged" where a log has both."""

    dtype: str
    head_dtype: str
    sampler_dtype: str
    sampler_head_dtype: str

    def words(self, side: str) -> str:
        """The dtypes of a side, "sampler" or "trainer", in words."""
        dtype, head = self.dtype, self.head_dtype
        if side == "sampler":
            dtype, head = self.sampler_dtype, self.sampler_head_dtype
        return dtype if dtype == head else f"{dtype}, logits in {head}"


# A log does not say in which dtypes its columns were computed.
LOGGED = Dtypes("logged", "logged", "logged", "logged")


@dataclass(frozen=True)
class DrawnWith:
    """Sampling parameters, and how many rollouts were drawn with them."""

    temperature: float
    top_k: int
    top_p: float
    rollouts: int
    min_p: float | None = field(default=None, metadata=OPTIONAL)
    biased_tokens: int | None = field(default=None, metadata=OPTIONAL)
    allowed_tokens: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class Source:
    """How the rollouts came about: drawn by an engine, or logged. None is what does not apply."""

    seed: int | None = field(default=None, metadata=OPTIONAL)
    max_tokens: int | None = field(default=None, metadata=OPTIONAL)
    prompts: str | None = field(default=None, metadata=OPTIONAL)
    log: str | None = field(default=None, metadata=OPTIONAL)
    weight_version: int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class Assumed:
    """What the figures of a report rest on."""

    distributions: list[DrawnWith]
    dtypes: Dtypes = field(metadata=PART)
    device: str
    source: Source = field(metadata=PART)
    versions: dict[str, str]


def assumed(
    dtypes: Dtypes, sampling_params: Iterable[SamplingParams], device: str, source: Source
) -> Assumed:
    """What the figures rest on. sampling_params: of every rollout."""
    return Assumed(
        [
            DrawnWith(
                params.temperature,
                params.top_k,
                params.top_p,
                count,
                params.min_p or None,
                len(params.logit_bias) or None,
                None if params.allowed_token_ids is None else len(params.allowed_token_ids),
            )
            for params, count in _counted(sampling_params).items()
        ],
        dtypes,
        device,
        source,
        versions(),
    )


def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages that decide bits."""
    known = {name: installed for name in _PACKAGES if (installed := installed_version(name))}
    return known | {"python": platform.python_version()}


def distribution(params: DrawnWith) -> str:
    """Sampling parameters in words. Temperature, top-p and top-k are there where they are off, too."""
    token_limits = ""
    if params.biased_tokens:
        token_limits += f", a bias of {params.biased_tokens:,} tokens"
    if params.allowed_tokens is not None:
        token_limits += f", {params.allowed_tokens:,} tokens allowed"
    if params.temperature == 0.0:
        return f"greedy (temperature 0; log-probabilities of temperature 1){token_limits}"
    top_k, top_p = params.top_k, params.top_p
    min_p = "" if params.min_p is None else f", min-p {params.min_p:g}"
    return (
        f"temperature {params.temperature:g}, top-p {'off' if top_p >= 1.0 else f'{top_p:g}'}, "
        f"top-k {'off' if top_k <= 0 else top_k}{min_p}{token_limits}"
    )


def assumed_words(params: SamplingParams) -> str:
    """What was taken for the sampling parameters of rollouts that a log says nothing of."""
    values = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    if params.min_p > 0.0:
        values["min_p"] = params.min_p
    *first, last = (f"{name} {value:g}" for name, value in values.items())
    options = ", ".join(f"--{name}" for name in values)
    return f"{', '.join(first)} and {last} were assumed ({options})."


def kept_set(distributions: Sequence[DrawnWith]) -> str:
    """The name of the set of tokens that the trainer keeps; empty where it keeps all."""
    cut = [d for d in distributions if d.temperature != 0.0]
    names = [
        name
        for name, cuts in (
            ("top-k", any(d.top_k > 0 for d in cut)),
            ("top-p", any(d.top_p < 1.0 for d in cut)),
            ("min-p", any(d.min_p is not None for d in cut)),
            ("allowed-token", any(d.allowed_tokens is not None for d in distributions)),
        )
        if cuts
    ]
    return " and ".join(names)


def _counted(sampling_params: Iterable[SamplingParams]) -> dict[SamplingParams, int]:
    counts: dict[SamplingParams, int] = {}
    for params in sampling_params:
        counts[params] = counts.get(params, 0) + 1
    return counts


def distribution_words(distributions: Sequence[DrawnWith]) -> str:
    """How tokens were drawn, in words."""
    if not distributions:
        return "the log does not say how"
    if len(distributions) == 1:
        return f"at {distribution(distributions[0])}"
    parts = [f"{d.rollouts} at {distribution(d)}" for d in distributions[:_LISTED]]
    left = len(distributions) - _LISTED
    return "; ".join(parts) + (f"; {left} other settings" if left > 0 else "")
