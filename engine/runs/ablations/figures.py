"""The figures of an ablation's runs, read from their folders, and their spread over seeds."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ....files.inputs import RUN_FILE_BYTES, read_text
from ....files.reading import parse_json
from ..folder import FAILED, METRICS
from ..held_out import MEAN_REWARD, SAMPLER_REWARD, SAMPLER_TRAINING_REWARD, TRAINING_REWARD, held_out_curve
from ..loaded import parse_metrics

# The metrics that are kept step by step.
BY_STEP = ("reward/mean", MEAN_REWARD, "mismatch/k3", "entropy", "grad_norm")
# A run has collapsed when its reward falls below this share of its peak and stays there until the end.
COLLAPSED = 0.8
# Figures of a run that are averaged over seeds.
FIGURES = (
    "reward_best",
    "reward_last",
    "reward_last10",
    "held_out_last",
    "sampler_held_out_last",
    "policies_apart",
    "training_last",
    "sampler_training_last",
    "entropy_last10",
    "mismatch_k3_mean",
    "mismatch_k3_sequence_mean",
    "mismatch_mean_abs_mean",
    "mismatch_max_abs",
    "skipped_steps",
    "seconds",
)


def cell_result(path: Path, settings: Mapping[str, str], seed: int) -> dict[str, Any]:
    """The figures of one run, read from its folder.

    `series` holds the (step, value) pairs of each metric of BY_STEP; the held-out reward is by steps done.
    """
    lines = [_parsed(path / METRICS, line, parse_metrics) for line in _read(path / METRICS).splitlines()]
    summary, failed = (_parsed(path / name, _read(path / name) or "{}") for name in ("summary.json", FAILED))
    series = {name: [(m["step"], m[name]) for m in lines if m.get(name) is not None] for name in BY_STEP}
    series[MEAN_REWARD] = held_out_curve(lines)
    rewards, held_out = ([v for _, v in series[name]] for name in ("reward/mean", MEAN_REWARD))
    seconds = [m["time/sample_s"] + m["time/train_s"] for m in lines]
    training = _values(lines, TRAINING_REWARD)
    # With one policy, the sampler's is the trainer's.
    same = not _differs(lines)
    sampler_held_out = _last(_values(lines, SAMPLER_REWARD) or held_out * same)
    sampler_training = _last(_values(lines, SAMPLER_TRAINING_REWARD) or training * same)
    return {
        "settings": dict(settings),
        "seed": seed,
        "run": str(path),
        "error": failed.get("error"),
        "fingerprint": summary.get("fingerprint"),
        "steps": len(lines),
        "reward_best": max(rewards, default=math.nan),
        "reward_last": _last(rewards),
        "reward_last10": _mean(rewards[-10:]),
        "held_out_last": _last(held_out),
        "sampler_held_out_last": sampler_held_out,
        "policies_apart": sampler_held_out - _last(held_out),
        "training_last": _last(training),
        "sampler_training_last": sampler_training,
        "entropy_last10": _mean([v for _, v in series["entropy"]][-10:]),
        "collapse_step": collapse_step(rewards),
        "mismatch_k3_mean": _mean([v for _, v in series["mismatch/k3"]]),
        "mismatch_k3_sequence_mean": _mean(_values(lines, "mismatch/k3_sequence")),
        "mismatch_mean_abs_mean": _mean(_values(lines, "mismatch/mean_abs")),
        "mismatch_max_abs": max((m["mismatch/max_abs"] for m in lines), default=math.nan),
        "skipped_steps": sum(m.get("scaling/skipped", 0.0) > 0 for m in lines),
        "seconds": summary.get("seconds", math.fsum(seconds)),
        "series": series,
    }


def _last(values: Sequence[float]) -> float:
    return values[-1] if values else math.nan


def _values(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A metric of the steps that have it."""
    return [m[name] for m in lines if m.get(name) is not None]


def _differs(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the sampler and the trainer of a run had other probabilities anywhere."""
    return any(m["mismatch/frac_equal"] != 1.0 for m in lines)


def _read(path: Path) -> str:
    return read_text(path, RUN_FILE_BYTES) if path.exists() else ""


_ANY_JSON = partial(parse_json, non_finite=True)


def _parsed(path: Path, text: str, parse: Callable[[str], Any] = _ANY_JSON) -> dict[str, Any]:
    """A JSON object of the file `path`. Raises ValueError."""
    try:
        value = parse(text)
        if not isinstance(value, dict):
            raise ValueError("holds something else than an object")
    except ValueError as error:
        raise ValueError(f"ablate: {path} {error}; remove the run's folder, and it is done again") from None
    return value


def collapse_step(rewards: Sequence[float]) -> int | None:
    """The step from which the reward stays below COLLAPSED of its peak to the end; None where no step is."""
    if not rewards or max(rewards) <= 0:
        return None
    peak = max(rewards)
    last_good = max(i for i, r in enumerate(rewards) if r >= COLLAPSED * peak)
    return last_good + 1 if last_good + 1 < len(rewards) else None


def summarise(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each combination of settings.

    An entry holds the figures of its runs. It also holds mean, minimum and maximum over seeds: of each
    figure, and of each metric of BY_STEP at each step.
    """
    by_settings: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_settings.setdefault(json.dumps(result["settings"]), []).append(result)
    combinations = []
    for runs in by_settings.values():
        entry: dict[str, Any] = {"settings": runs[0]["settings"], "seeds": [r["seed"] for r in runs]}
        entry |= {name: spread([r[name] for r in runs]) for name in FIGURES}
        entry["collapsed"] = sum(r["collapse_step"] is not None for r in runs)
        entry["failed"] = sum(r["error"] is not None for r in runs)
        entry["by_step"] = {name: _by_step([r["series"][name] for r in runs]) for name in BY_STEP}
        entry["runs"] = [{k: v for k, v in r.items() if k not in ("series", "settings")} for r in runs]
        combinations.append(entry)
    return combinations


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, minimum and maximum of the values that are finite; NaN where none is."""
    finite = [v for v in values if math.isfinite(v)]
    return {"mean": _mean(finite), "min": min(finite, default=math.nan), "max": max(finite, default=math.nan)}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _by_step(series: Sequence[Sequence[tuple[int, float]]]) -> list[dict[str, float]]:
    """Mean, minimum and maximum at each step, over the runs that have that step."""
    values: dict[int, list[float]] = {}
    for run in series:
        for step, value in run:
            values.setdefault(step, []).append(value)
    return [{"step": step, **spread(values[step])} for step in sorted(values)]
