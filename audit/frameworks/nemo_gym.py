"""NeMo Gym: rollouts.jsonl, one line for each rollout, with the items of its response.

The last item of each call of the model has the ids that the call was given and those that it drew, where the
model's server was asked for them. A call has the whole prompt that the model saw.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..formats import fields
from ..formats.framework import SAMPLER, Framework, Log
from ..formats.record import LoggedRollout

_NO_TOKENS = (
    "no item of its response has generation_token_ids; set return_token_id_information: true for the model's "
    "server, as vllm_model_for_training.yaml does"
)


def recognises(row: dict[str, Any]) -> bool:
    """Whether a line is a rollout."""
    return "responses_create_params" in row and isinstance(row.get("response"), dict)


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The calls of a line, each a turn. Raises ValueError, or KeyError with a field.

    There is none where the model wrote nothing, as when the prompt was too long.
    """
    response = fields.mapping("response", row["response"])
    items = fields.objects("response.output", response["output"], "items")
    calls = [item for item in items if item.get("generation_token_ids")]
    if not calls and any(map(_written, items)):
        raise ValueError(_NO_TOKENS)
    params = fields.optional_params("responses_create_params", row["responses_create_params"])
    for turn, call in enumerate(calls):
        name = f"generation_token_ids of call {turn}"
        completion = fields.token_ids(name, call["generation_token_ids"])
        logprobs = call["generation_log_probs"]
        yield LoggedRollout(
            prompt_ids=fields.token_ids(f"prompt_token_ids of call {turn}", call["prompt_token_ids"]),
            completion_ids=completion,
            logprobs=fields.logprobs(f"generation_log_probs of call {turn}", logprobs, len(completion)),
            sampling_params=params,
            reward=fields.optional_number("reward", row.get("reward")),
            prompt=fields.label("_ng_task_index", row.get("_ng_task_index")),
            sample=fields.label("_ng_rollout_index", row.get("_ng_rollout_index")),
            turn=turn,
        )


def _written(item: dict[str, Any]) -> bool:
    """Whether the model wrote an item: a call of a function, a thought, or a message with a text."""
    if item.get("type") in ("function_call", "reasoning"):
        return True
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, dict) and part.get("text") for part in parts)


FRAMEWORK = Framework(
    name="nemo-gym",
    title="NeMo Gym",
    page="gyms.md",
    source="NeMo Gym, `nemo_gym/rollout_collection.py`",
    logs=(
        Log(
            name="nemo-gym",
            file="`rollouts.jsonl`",
            switch="`return_token_id_information: true` for the model's server",
            recognises=recognises,
            parse=parse,
            fields={
                "completion_ids turn": "`prompt_token_ids` and `generation_token_ids` of the last item of "
                "each call; each call is a turn, and answers of tools are in the next call's prompt",
                "logprobs": "`generation_log_probs`, not rounded",
                "sampling_params": "`responses_create_params`, where it has a temperature; else as given by "
                "`--temperature`",
                "prompt sample reward": "`_ng_task_index`, `_ng_rollout_index`, `reward`",
            },
            marks=("responses_create_params",),
            columns=SAMPLER,
        ),
    ),
)
