"""tinker-cookbook: capture/sample.jsonl, one line for each sampling call with all its samples.

A call that failed or was cancelled has no samples.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..formats import fields
from ..formats.framework import SAMPLER, Framework, Log
from ..formats.record import LoggedRollout


def recognises(row: dict[str, Any]) -> bool:
    """Whether a line is a captured call."""
    return row.get("kind") in ("sample", "train_op") and "scope" in row


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The samples of a call. Raises ValueError, or KeyError with a field."""
    if row.get("kind") != "sample" or not row.get("samples"):
        return
    prompt = fields.token_ids("prompt_tokens", row["prompt_tokens"])
    scope = fields.mapping("scope", row.get("scope"))
    for index, sample in enumerate(fields.objects("samples", row["samples"], "samples")):
        tokens = fields.token_ids(f"samples[{index}].tokens", sample["tokens"])
        yield LoggedRollout(
            prompt_ids=prompt,
            completion_ids=tokens,
            logprobs=fields.optional_logprobs(
                f"samples[{index}].logprobs", sample.get("logprobs"), len(tokens)
            ),
            sampling_params=fields.optional_params("sampling_params", row.get("sampling_params")),
            step=fields.optional_integer("scope.iteration", scope.get("iteration")),
            prompt=fields.label("scope.group_idx", scope.get("group_idx")),
            sample=fields.label("scope.traj_idx", scope.get("traj_idx", index)),
            truncated=fields.truncated("stop_reason", sample.get("stop_reason")),
        )


FRAMEWORK = Framework(
    name="tinker",
    title="tinker-cookbook",
    page="tinker.md",
    source="tinker-cookbook 0.6.1, `tinker_cookbook/capture`",
    logs=(
        Log(
            name="tinker",
            file="`capture/sample.jsonl`",
            switch="three lines: a capture of the calls",
            recognises=recognises,
            parse=parse,
            fields={
                "completion_ids": "`prompt_tokens`, and `tokens` of each of the `samples`",
                "logprobs": "`logprobs` of each sample, not rounded",
                "sampling_params": "`sampling_params`",
                "step prompt sample": "`iteration`, `group_idx` and `traj_idx` of the `scope`, as given to "
                "`capture`",
                "truncated": "`stop_reason`",
            },
            marks=("scope", "samples"),
            columns=SAMPLER,
        ),
    ),
)
