"""torchtitan's RL recorder: rollout_samples.jsonl, one line for each rollout, with its turns.

The ids and the logprobs are there only with log_tensors and log_logprobs. A turn has the whole prompt that
the model saw.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..formats import fields
from ..formats.framework import SAMPLER, Framework, Log
from ..formats.record import LoggedRollout


def recognises(row: dict[str, Any]) -> bool:
    """Whether a line is a recorded rollout."""
    turns = row.get("turns")
    return "rollout_id" in row and isinstance(turns, list) and "reward_breakdown" in row


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The turns of a line. Raises ValueError, or KeyError with a field."""
    for index, turn in enumerate(fields.objects("turns", row["turns"], "turns")):
        if missing := [name for name in ("prompt_token_ids", "completion_token_ids") if name not in turn]:
            raise ValueError(f"turns[{index}] has no {missing[0]}; set log_tensors in the recorder's Config")
        name = f"turns[{index}].completion_token_ids"
        completion = fields.token_ids(name, turn["completion_token_ids"])
        yield LoggedRollout(
            prompt_ids=fields.token_ids(f"turns[{index}].prompt_token_ids", turn["prompt_token_ids"]),
            completion_ids=completion,
            logprobs=fields.optional_logprobs(
                f"turns[{index}].completion_logprobs", turn.get("completion_logprobs"), len(completion)
            ),
            weight_span=_span(turn, index),
            reward=fields.optional_number("reward", row.get("reward")),
            advantage=fields.optional_number("advantage", row.get("advantage")),
            prompt=fields.label("group_id", row.get("group_id")),
            sample=fields.label("rollout_id", row.get("rollout_id")),
            turn=index,
        )


def _span(turn: dict[str, Any], index: int) -> tuple[int, int] | None:
    """The oldest and the newest weights of a turn."""
    low = fields.optional_integer(f"turns[{index}].min_policy_version", turn.get("min_policy_version"))
    high = fields.optional_integer(f"turns[{index}].max_policy_version", turn.get("max_policy_version"))
    if low is None and high is None:
        return None
    low, high = high if low is None else low, low if high is None else high
    if low > high:
        raise ValueError(f"turns[{index}]: min_policy_version ({low}) is above max_policy_version ({high})")
    return low, high


FRAMEWORK = Framework(
    name="titanrl",
    title="torchtitan RL",
    page="torchtitan.md",
    source="torchtitan, the rollout recorder of `torchtitan/experiments/rl`",
    logs=(
        Log(
            name="titanrl",
            file="`rollout_samples.jsonl`",
            switch="two settings of its recorder",
            recognises=recognises,
            parse=parse,
            fields={
                "completion_ids turn": "`prompt_token_ids` and `completion_token_ids` of each turn, with "
                "`log_tensors`",
                "logprobs": "`completion_logprobs` of each turn, with `log_logprobs`; not rounded",
                "weight_span": "`min_policy_version` and `max_policy_version` of each turn",
                "prompt sample reward advantage": "`group_id`, `rollout_id`, `reward`, `advantage`",
            },
            marks=("turns",),
            columns=SAMPLER,
            remedy="set log_logprobs in the recorder's Config",
        ),
    ),
)
