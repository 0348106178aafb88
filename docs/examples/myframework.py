"""My framework: rollouts/STEP.jsonl, one line for each completion, both columns in it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..formats import fields
from ..formats.framework import Framework, Log, having
from ..formats.record import LoggedRollout


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The completion of a line. Raises ValueError, or KeyError with a field."""
    answer = fields.token_ids("answer_ids", row["answer_ids"])
    yield LoggedRollout(
        prompt_ids=fields.token_ids("question_ids", row["question_ids"]),
        completion_ids=answer,
        logprobs=fields.logprobs("engine_logprobs", row["engine_logprobs"], len(answer)),
        trainer_logprobs=fields.logprobs("actor_logprobs", row["actor_logprobs"], len(answer)),
        sampling_params=fields.sampling_params(row),
        step=fields.optional_integer("update", row.get("update")),
    )


FRAMEWORK = Framework(
    name="myframework",
    title="My framework",
    source="My framework 1.0, `my/rollout_writer.py`",
    logs=(
        Log(
            name="myframework",
            file="`rollouts/STEP.jsonl`",
            switch="`log_rollouts=true`",
            recognises=having("question_ids answer_ids"),
            parse=parse,
            fields={
                "completion_ids": "`question_ids`, `answer_ids`",
                "logprobs": "`engine_logprobs`, not rounded",
                "trainer_logprobs": "`actor_logprobs`, not rounded",
                "sampling_params": "`temperature`, `top_p`",
                "step": "`update`",
            },
            marks=("question_ids",),
        ),
    ),
)
