"""What an audit assumed: the settings, prompts and versions under which its figures hold."""

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..kernels.sampling_params import SamplingParams

_PACKAGES = ("zerokl", "torch", "transformers", "tokenizers", "vllm", "numpy")
# Different sampling parameters of a log that are listed.
_LISTED = 4


def assumed(
    dtypes: Mapping[str, str],
    sampling_params: Iterable[SamplingParams],
    device: str,
    drawn: Mapping[str, Any],
) -> dict[str, Any]:
    """What the figures rest on, for JSON.

    dtypes: AuditConfig.dtypes. sampling_params: of every rollout. drawn: how the rollouts came about (seed,
    prompts), by name.
    """
    distributions = [
        {**params._asdict(), "rollouts": count} for params, count in _counted(sampling_params).items()
    ]
    return {
        "distributions": distributions,
        **dtypes,
        "device": device,
        **drawn,
        "versions": {name: found for name in _PACKAGES if (found := _version(name))}
        | {"python": platform.python_version()},
    }


def rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of everything that was assumed, in words."""
    a = report["assumed"]
    shown = [("model", str(report["model"]))]
    if report.get("trainer_model"):
        shown = [("sampler's model", str(report["model"])), ("trainer's model", str(report["trainer_model"]))]
    shown += [
        ("tokens were drawn", _distributions(a["distributions"])),
        ("sampler", f"{report['sampler']}, {_dtypes(a, 'sampler_')}"),
        ("trainer", f"{report['trainer']}, {_dtypes(a, '')}"),
        ("device", a["device"]),
    ]
    keys = ("seed", "prompts", "log", "weight_version", "max_tokens")
    shown += [(key.replace("_", " "), str(a[key])) for key in keys if a.get(key) is not None]
    shown += [
        (f"{where}'s {name}", value)
        for where, settings in report.get("engine_settings", {}).items()
        for name, value in settings.items()
        if where != "machine"
    ]
    if machine := report.get("engine_settings", {}).get("machine"):
        shown.append(("machine", ", ".join(f"{name} {value}" for name, value in machine.items())))
    if "settings_fingerprint" in report:
        shown.append(("fingerprint of the settings", report["settings_fingerprint"][:16]))
    return [*shown, ("versions", ", ".join(f"{name} {v}" for name, v in a["versions"].items()))]


def distribution(params: Mapping[str, Any]) -> str:
    """Sampling parameters in words, those that cut nothing included."""
    if params["temperature"] == 0.0:
        return "greedy (temperature 0; log-probabilities of temperature 1)"
    top_k, top_p = params["top_k"], params["top_p"]
    return (
        f"temperature {params['temperature']:g}, top-p {'off' if top_p >= 1.0 else f'{top_p:g}'}, "
        f"top-k {'off' if top_k <= 0 else top_k}"
    )


def distributions(report: Mapping[str, Any]) -> str:
    """How the tokens were drawn, as far as a log says it, as the beginning of a sentence."""
    if report.get("distribution_unsaid"):
        return "the log does not say how all of them were drawn"
    return f"the log says that they were drawn {_distributions(report['assumed']['distributions'])}"


def kept_set(distributions: Sequence[Mapping[str, Any]]) -> str:
    """The name of the set of tokens that the trainer keeps; empty where it keeps all."""
    cut = [d for d in distributions if d["temperature"] != 0.0]
    names = [
        name
        for name, cuts in (
            ("top-k", any(d["top_k"] > 0 for d in cut)),
            ("top-p", any(d["top_p"] < 1.0 for d in cut)),
        )
        if cuts
    ]
    return " and ".join(names)


def _counted(sampling_params: Iterable[SamplingParams]) -> dict[SamplingParams, int]:
    counts: dict[SamplingParams, int] = {}
    for params in sampling_params:
        counts[params] = counts.get(params, 0) + 1
    return counts


def _distributions(distributions: Sequence[Mapping[str, Any]]) -> str:
    if not distributions:
        return "the log does not say how"
    if len(distributions) == 1:
        return f"at {distribution(distributions[0])}"
    words = [f"{d['rollouts']} at {distribution(d)}" for d in distributions[:_LISTED]]
    left = len(distributions) - _LISTED
    return "; ".join(words) + (f"; {left} other settings" if left > 0 else "")


def _dtypes(assumed: Mapping[str, Any], side: str) -> str:
    dtype, head = assumed[f"{side}dtype"], assumed[f"{side}head_dtype"]
    return dtype if dtype == head else f"{dtype}, logits in {head}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
