"""tinker-cookbook: capture/sample.jsonl, one line for each sampling call with all its samples.

A call that failed or was cancelled has no samples.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import fields
from .record import LoggedRollout


def recognises(row: dict[str, Any]) -> bool:
    """Whether a line is a captured call."""
    return row.get("kind") in ("sample", "train_op") and "scope" in row


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The samples of a call. Raises ValueError, or KeyError with a field."""
    if row.get("kind") != "sample" or not row.get("samples"):
        return
    prompt = fields.token_ids("prompt_tokens", row["prompt_tokens"])
    scope = fields.mapping("scope", row.get("scope"))
    for index, sample in enumerate(fields.listed("samples", row["samples"], "samples")):
        if not isinstance(sample, dict):
            raise ValueError(f"samples[{index}] is no JSON object")
        tokens = fields.token_ids(f"samples[{index}].tokens", sample["tokens"])
        logprobs = sample.get("logprobs")
        yield LoggedRollout(
            prompt_ids=prompt,
            completion_ids=tokens,
            logprobs=None
            if logprobs is None
            else fields.logprobs(f"samples[{index}].logprobs", logprobs, len(tokens)),
            sampling_params=_params(row.get("sampling_params")),
            step=fields.optional_integer("scope.iteration", scope.get("iteration")),
            prompt=fields.label("scope.group_idx", scope.get("group_idx")),
            sample=fields.label("scope.traj_idx", scope.get("traj_idx", index)),
            truncated=fields.truncated("stop_reason", sample.get("stop_reason")),
        )


def _params(params: Any) -> Any:
    params = fields.mapping("sampling_params", params)
    if params.get("temperature") is None:
        return None
    return fields.sampling_params(params)
