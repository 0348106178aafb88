"""Our own log: JSON lines, one for each completion. log.schema.json has every field.

    {"prompt_ids": [..], "completion_ids": [..], "logprobs": [..], "temperature": 1.0}

`turns` takes the place of prompt_ids and completion_ids where each turn has a prompt of its own. What stands
beside `turns` is said of all of them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...files.reading import json_ready
from ..formats import fields
from ..formats.framework import Framework, Log
from ..formats.record import LoggedRollout, is_logged_nan

# What a turn may say for itself. The rest of a line is said of the completion as a whole.
_OF_A_TURN = (
    "prompt_ids",
    "completion_ids",
    "logprobs",
    "trainer_logprobs",
    "mask",
    "weight_version",
    "sampling_mask",
    "routed_experts",
    "advantage",
    "finish_reason",
)


def recognises(row: dict[str, Any]) -> bool:
    """Whether a line has our fields."""
    turns = row.get("turns")
    first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], dict) else row
    return "prompt_ids" in first and "completion_ids" in first


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The completions of a line: one, or one for each turn. Raises ValueError, or KeyError with a field.

    There is none where an environment ended a trajectory before the model's first turn.
    """
    if row.get("turn_starts") == [] and "turn_rewards" in row:
        return
    if row.get("turns") is None:
        yield _completion(row, None)
        return
    shared = {name: value for name, value in row.items() if name != "turns"}
    if mixed := [name for name in ("prompt_ids", "completion_ids", "logprobs") if name in row]:
        raise ValueError(f"has turns, and {mixed[0]} beside them; each turn has its own")
    turns = fields.objects("turns", row["turns"], "turns")
    if not turns:
        raise ValueError("turns must be a list of turns that is not empty")
    for index, turn in enumerate(turns):
        if unknown := [name for name in turn if name not in _OF_A_TURN]:
            raise ValueError(f"turns[{index}] has {unknown[0]}; a turn takes {', '.join(_OF_A_TURN)}")
        with fields.named(f"turns[{index}]"):
            yield _completion(shared | turn, index)


def _completion(row: dict[str, Any], turn: int | None) -> LoggedRollout:
    prompt = fields.token_ids("prompt_ids", row["prompt_ids"])
    completion = fields.token_ids("completion_ids", row["completion_ids"])
    count = len(completion)
    drawn = fields.mask("mask", row.get("mask"), count)
    span, versions = fields.versions("weight_version", row.get("weight_version"), count)
    known = "temperature" in row
    return LoggedRollout(
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=fields.logprobs("logprobs", row["logprobs"], count, drawn),
        trainer_logprobs=fields.optional_logprobs(
            "trainer_logprobs", row.get("trainer_logprobs"), count, drawn
        ),
        mask=drawn,
        sampling_params=fields.sampling_params(row) if known else None,
        weight_span=span,
        token_versions=versions,
        decimals=fields.decimals("decimals", row.get("decimals")),
        trainer_decimals=fields.decimals("trainer_decimals", row.get("trainer_decimals")),
        sampling_mask=fields.sampling_mask("sampling_mask", row.get("sampling_mask"), completion),
        routed_experts=fields.routed_experts(
            "routed_experts", row.get("routed_experts"), (count, len(prompt) + count, len(prompt) + count - 1)
        ),
        reward=fields.optional_number("reward", row.get("reward")),
        advantage=fields.advantage("advantage", row.get("advantage"), count),
        step=fields.optional_integer("step", row.get("step")),
        prompt=fields.label("prompt", row.get("prompt")),
        sample=fields.label("sample", row.get("sample")),
        turn=turn,
        truncated=fields.truncated("finish_reason", row.get("finish_reason") or row.get("finish")),
        prompt_text=fields.text("prompt_text", row.get("prompt_text")),
        completion_text=fields.text("completion_text", row.get("completion_text")),
    )


def as_row(rollout: LoggedRollout) -> dict[str, Any]:
    """A completion as a line of our log; what is not known is left out. `parse` gives the same completion.

    A turn becomes a line of its own. It is strict JSON: a reward that is NaN is its name.
    """
    if rollout.completion_ids is None:
        raise ValueError("has no token ids")
    params, span = rollout.sampling_params, rollout.weight_span
    versions = None if rollout.token_versions is None else rollout.token_versions.tolist()
    if versions is None and span is not None and span[0] == span[1]:
        versions = span[0]
    row = {
        "prompt_ids": list(rollout.prompt_ids),
        "completion_ids": list(rollout.completion_ids),
        "logprobs": _numbers(rollout.logprobs) or [None] * len(rollout.completion_ids),
        "trainer_logprobs": _numbers(rollout.trainer_logprobs),
        "mask": None if rollout.mask is None else rollout.mask.astype(int).tolist(),
        "temperature": params and params.temperature,
        "top_k": params and params.top_k,
        "top_p": params and params.top_p,
        "min_p": (params and params.min_p) or None,
        "logit_bias": (params and {str(token): bias for token, bias in params.logit_bias}) or None,
        "allowed_token_ids": params and params.allowed_token_ids and list(params.allowed_token_ids),
        "weight_version": versions,
        "decimals": rollout.decimals,
        "trainer_decimals": rollout.trainer_decimals,
        "sampling_mask": rollout.sampling_mask and [x and list(x) for x in rollout.sampling_mask],
        "routed_experts": None if rollout.routed_experts is None else rollout.routed_experts.tolist(),
        "reward": rollout.reward,
        "advantage": list(rollout.advantage) if isinstance(rollout.advantage, tuple) else rollout.advantage,
        "step": rollout.step,
        "prompt": rollout.prompt,
        "sample": rollout.sample,
        "finish_reason": {True: "length", False: "stop"}.get(rollout.truncated),
        "prompt_text": rollout.prompt_text,
        "completion_text": rollout.completion_text,
    }
    return json_ready({name: value for name, value in row.items() if value is not None})


def _numbers(values: Any) -> list[float | None] | None:
    """fp32 values, with null where there is none: the log's own NaN stays one."""
    if values is None:
        return None
    absent = np.isnan(values) & ~is_logged_nan(values)
    return [None if none else x for x, none in zip(values.tolist(), absent.tolist(), strict=True)]


FRAMEWORK = Framework(
    name="zerokl",
    title="your own loop, or another framework",
    page="own-loop.md",
    source="`audit/formats/log.schema.json`",
    logs=(
        Log(
            name="zerokl",
            file="JSON lines in zerokl's own fields",
            switch="a `Recorder`",
            recognises=recognises,
            parse=parse,
            fields={
                "completion_ids mask turn": "`prompt_ids`, `completion_ids`, `mask`, `turns`",
                "logprobs trainer_logprobs": "`logprobs`, `trainer_logprobs`, with `decimals` and "
                "`trainer_decimals` where they are rounded",
                "decimals trainer_decimals": "`decimals`, `trainer_decimals`",
                "sampling_params sampling_mask": "`temperature` and the filters, `sampling_mask`",
                "weight_span token_versions": "`weight_version`",
                "routed_experts": "`routed_experts`",
                "reward advantage step prompt sample": "under these names",
                "truncated": "`finish_reason`",
                "prompt_text completion_text": "under these names",
            },
            marks=("prompt_ids", "turns"),
            columns="what you write",
        ),
    ),
)
