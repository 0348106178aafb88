"""Logged rollouts of any framework: JSON lines.

    {"prompt_ids": [..], "completion_ids": [..], "logprobs": [..],
     "temperature": 1.0, "top_p": 1.0, "top_k": 0, "weight_version": 0}

An object takes one line of the file. logprobs are the sampler's: one for each completion token, under the
distribution that the token was drawn from. top_p, top_k and weight_version may be missing or null. A top_k of
0 or below keeps all tokens.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ....kernels.sampling_params import SamplingParams
from ...rollout.types import Rollout


def read_log(
    path: Path, vocab: int, longest: int = 0, version: int | None = None
) -> list[tuple[Rollout, SamplingParams]]:
    """The rollouts of a log.

    version: takes only the rollouts of this weight version; None takes all. longest: tokens of a rollout at
    most; 0 is no limit. Raises ValueError that names the malformed line. Raises ValueError that names the
    weight versions when the rollouts are of several, since a model has one.
    """
    rollouts: list[tuple[Rollout, SamplingParams]] = []
    try:
        # Not splitlines: it also cuts at characters that JSON allows in a string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"audit: {path} cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed = _parse(json.loads(line), len(rollouts), vocab)
            if 0 < longest < (total := sum(map(len, parsed[0].pair))):
                raise ValueError(f"has {total} tokens, more than the model's context ({longest})")
        except (ValueError, TypeError, KeyError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"audit: {path}, line {number}: {reason}") from None
        if version in (None, parsed[0].weight_version):
            rollouts.append(parsed)
    if not rollouts:
        raise ValueError(
            f"audit: {path} holds no rollout{'' if version is None else f' of weight version {version}'}"
        )
    if len(versions := sorted({r.weight_version for r, _ in rollouts})) > 1:
        raise ValueError(
            f"audit: {path} holds rollouts of weight versions {versions}; "
            "choose the model's with --weight_version"
        )
    return rollouts


def _parse(row: Any, index: int, vocab: int) -> tuple[Rollout, SamplingParams]:
    """One line as a rollout. Raises ValueError for a wrong field, and KeyError for a missing one."""
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    ids = {name: _token_ids(name, row[name], vocab) for name in ("prompt_ids", "completion_ids")}
    if not isinstance(row["logprobs"], list):
        raise ValueError("logprobs must be a list of numbers")
    values = [_number(f"logprobs[{i}]", x) for i, x in enumerate(row["logprobs"])]
    if len(values) != len(ids["completion_ids"]):
        raise ValueError(f"has {len(values)} logprobs for {len(ids['completion_ids'])} completion_ids")
    wrong = next((i for i, x in enumerate(values) if not math.isfinite(x) or x > 0), None)
    if wrong is not None:
        raise ValueError(f"logprobs[{wrong}] ({values[wrong]}) is no log-probability")
    sampling_params = SamplingParams(
        _number("temperature", row["temperature"]),
        max(0, _integer("top_k", row.get("top_k"), 0)),
        _number("top_p", row.get("top_p"), 1.0),
    ).check()
    version = _integer("weight_version", row.get("weight_version"), 0)
    logprobs = np.array(values, np.float32)
    return Rollout(index, 0, ids["prompt_ids"], ids["completion_ids"], logprobs, "", version), sampling_params


def _number(name: str, value: Any, default: float | None = None) -> float:
    """A JSON number. A value that is null or missing is the default, where there is one."""
    if value is None and default is not None:
        return default
    if type(value) not in (int, float):
        raise ValueError(f"{name} ({value!r}) must be a number")
    return float(value)


def _integer(name: str, value: Any, default: int) -> int:
    number = _number(name, value, float(default))
    if not number.is_integer():
        raise ValueError(f"{name} ({value!r}) must be a whole number")
    return int(number)


def _token_ids(name: str, value: Any, vocab: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(t) is int for t in value):
        raise ValueError(f"{name} must be a list of token ids that is not empty")
    wrong = next((t for t in value if not 0 <= t < vocab), None)
    if wrong is not None:
        raise ValueError(f"{name} holds {wrong}, outside the model's vocabulary of {vocab}")
    return tuple(value)
