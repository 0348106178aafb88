"""summary.json: how a run ended. All but the seconds is derived from the run's other files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...files.reading import read_json
from ...files.writing import write_whole
from ...verify.difference import differences, same_json
from .held_out import ACCURACY, MEAN_REWARD

SUMMARY = "summary.json"
LAST = 5  # steps whose mean reward is reward_last5, at most


@dataclass(frozen=True)
class Summary:
    """How a run ended; the content of summary.json."""

    fingerprint: str  # the last chain value of the ledger: the hash of everything that the run computed
    weights: str  # the hash of the final weights alone
    steps: int
    tokens: int
    tokens_unequal: int
    mismatch_max_abs: float
    reward_first: float
    reward_last: float
    reward_last5: float
    held_out_reward: float | None
    held_out_accuracy: float | None  # of a reward that is 0 or 1
    seconds: float


def last_steps(steps: int) -> str:
    """Of which steps reward_last5 is the mean, in words, in a run of so many steps."""
    return "last step" if steps == 1 else f"last {min(steps, LAST)} steps"


def summarise(
    history: Sequence[Mapping[str, Any]], fingerprint: str, weights: str, seconds: float
) -> Summary:
    """The summary of a finished run. history: the metrics of all its steps."""
    last_rewards = [m["reward/mean"] for m in history[-LAST:]]
    held_out = [m for m in history if MEAN_REWARD in m]
    return Summary(
        fingerprint=fingerprint,
        weights=weights,
        steps=len(history),
        tokens=int(sum(m["tokens"] for m in history)),
        tokens_unequal=sum(round(m["tokens"] * (1 - m["mismatch/frac_equal"])) for m in history),
        mismatch_max_abs=max(m["mismatch/max_abs"] for m in history),
        reward_first=history[0]["reward/mean"],
        reward_last=history[-1]["reward/mean"],
        reward_last5=sum(last_rewards) / len(last_rewards),
        held_out_reward=held_out[-1][MEAN_REWARD] if held_out else None,
        held_out_accuracy=held_out[-1].get(ACCURACY) if held_out else None,
        seconds=seconds,
    )


def write_summary(path: Path, summary: Summary) -> None:
    """Write summary.json to the folder of a run. Raises OSError."""
    write_whole(path / SUMMARY, (json.dumps(vars(summary), indent=2) + "\n").encode())


def read_summary(path: Path) -> Summary | None:
    """The summary in the folder of a run; None without one.

    Raises ValueError for a file that is no summary.
    """
    file = path / SUMMARY
    if not file.exists():
        return None
    try:
        values = read_json(file, non_finite=True)
        if set(values) != {f.name for f in fields(Summary)}:
            raise ValueError("has other keys than a summary")
        summary = Summary(**values)
        if type(summary.seconds) not in (int, float) or not 0 <= summary.seconds < float("inf"):
            raise ValueError("has no seconds")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error})") from None
    return summary


def wrong_fields(summary: Summary, derived: Summary) -> list[str]:
    """A line for each field of a summary that is not the one derived from the run; the seconds cannot be."""
    wrong = differences(vars(summary), vars(derived), same_json)
    return [field.beside("must be") for field in wrong if field.quantity != "seconds"]


def numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics with its infinities. JSON has no number for them, so they were written as null."""
    return {key: float("inf") if value is None else value for key, value in line.items()}
