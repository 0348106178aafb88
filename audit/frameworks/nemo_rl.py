"""NeMo-RL: logs/exp_NNN/train_data_stepN.jsonl, one line for each sequence of a step, both columns in it.

Every value is a batch of one: the list of a sequence stands in another list. A column has an entry for each
token of the padded sequence, the prompt's tokens included. generation_logprobs are the sampler's,
prev_logprobs the trainer's. The file says nothing about the temperature.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...verify.mismatch import mean
from ..figures.gates import Columns, Gate
from ..formats import fields
from ..formats.aligned import Aligned
from ..formats.framework import Framework, Log, having
from ..formats.record import LoggedRollout


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The sequence of a line; none where no token was drawn. Raises ValueError, or KeyError with a field."""
    ids = fields.token_ids("token_ids", _sequence(row["token_ids"]))
    length = fields.integer("input_lengths", _scalar(row["input_lengths"]))
    if not 0 < length <= len(ids):
        raise ValueError(f"input_lengths ({length}) must lie in 1 .. {len(ids)}, the number of token_ids")
    aligned = Aligned("token_ids", ids, "token_loss_mask", _sequence(row["token_loss_mask"]), length)
    if not aligned.completion_ids:
        return
    step = re.search(r"step_?(\d+)", path.name)
    yield LoggedRollout(
        prompt_ids=aligned.prompt_ids,
        completion_ids=aligned.completion_ids,
        logprobs=aligned.logprobs("generation_logprobs", _sequence(row.get("generation_logprobs"))),
        trainer_logprobs=aligned.logprobs("prev_logprobs", _sequence(row.get("prev_logprobs"))),
        mask=aligned.mask,
        reward=fields.optional_number("rewards", _scalar(row.get("rewards"))),
        advantage=aligned.advantage("advantages", _scalar(_sequence(row.get("advantages")))),
        step=int(step[1]) if step else None,
        sample=fields.label("idx", row.get("idx")),
    )


def _sequence(value: Any) -> Any:
    """The inner list of a batch of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value


def _scalar(value: Any) -> Any:
    """The element of a batch of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _exp_abs(c: Columns) -> float:
    return mean(np.exp(np.abs(c.d)))


FRAMEWORK = Framework(
    name="nemo-rl",
    title="NeMo-RL",
    page="nemo-rl.md",
    source="NeMo-RL, `nemo_rl/algorithms/grpo.py`",
    logs=(
        Log(
            name="nemo-rl",
            file="`train_data_stepN.jsonl`",
            switch="nothing: it writes `train_data_stepN.jsonl`",
            recognises=having("token_ids token_loss_mask", "token_ids generation_logprobs"),
            parse=parse,
            fields={
                "completion_ids": "`token_ids`, cut to `input_lengths`; the prompt ends at the first token "
                "of `token_loss_mask`",
                "mask": "`token_loss_mask`; answers of tools are 0 and stay out of the figures",
                "logprobs": "`generation_logprobs`, not rounded",
                "trainer_logprobs": "`prev_logprobs`, not rounded",
                "reward advantage sample": "`rewards`, `advantages`, `idx`",
                "step": "from the file's name",
            },
            marks=("token_ids",),
        ),
    ),
    gate=Gate(
        _exp_abs,
        "token_mult_prob_error",
        "the mean of exp(|d|) over tokens",
        1.05,
        may_reach=False,
        source="the checks of NeMo-RL's test suites",
    ),
)
