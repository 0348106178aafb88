"""NeMo-RL: logs/exp_NNN/train_data_stepN.jsonl, one line for each sequence of a step, both columns in it.

Every value is a batch of one: the list of a sequence stands in another list. A column has an entry for each
token of the padded sequence, the prompt's tokens included. generation_logprobs are the sampler's,
prev_logprobs the trainer's. The file says nothing about the temperature.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import fields
from .record import LoggedRollout


def recognises(row: dict[str, Any]) -> bool:
    """Whether a line looks like one of train_data_stepN.jsonl."""
    return "token_ids" in row and ("token_loss_mask" in row or "generation_logprobs" in row)


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The sequence of a line; none where no token was drawn. Raises ValueError, or KeyError with a field."""
    ids = fields.token_ids("token_ids", _sequence(row["token_ids"]))
    length = fields.integer("input_lengths", _scalar(row["input_lengths"]))
    if not 0 < length <= len(ids):
        raise ValueError(f"input_lengths ({length}) must lie in 1 .. {len(ids)}, the number of token_ids")
    if "token_loss_mask" not in row:
        raise KeyError("token_loss_mask")
    columns = {
        name: fields.listed(name, _sequence(row[name]), "numbers")
        for name in ("token_loss_mask", "generation_logprobs", "prev_logprobs")
        if name in row
    }
    for name, column in columns.items():
        if len(column) != len(ids):
            raise ValueError(f"{name} has {len(column)} entries for {len(ids)} token_ids")
    mask = fields.mask("token_loss_mask", columns["token_loss_mask"], len(ids))
    mask = mask[:length]
    if not mask.any():
        return
    start = int(mask.argmax())
    if start == 0:
        raise ValueError("token_loss_mask: the first token was drawn, so there is no prompt")
    drawn, count = mask[start:], length - start
    step = re.search(r"step_?(\d+)", path.name)
    advantages = _sequence(row.get("advantages"))
    if isinstance(advantages, list):
        advantages = advantages[start:length] if len(advantages) == len(ids) else _scalar(advantages)
    yield LoggedRollout(
        prompt_ids=ids[:start],
        completion_ids=ids[start:length],
        logprobs=_column(columns, "generation_logprobs", start, count, drawn),
        trainer_logprobs=_column(columns, "prev_logprobs", start, count, drawn),
        mask=drawn,
        reward=fields.optional_number("rewards", _scalar(row.get("rewards"))),
        advantage=fields.advantage("advantages", advantages, count),
        step=int(step[1]) if step else None,
        sample=fields.label("idx", row.get("idx")),
    )


def _column(columns: dict[str, list], name: str, start: int, count: int, drawn: Any) -> Any:
    if name not in columns:
        return None
    return fields.logprobs(name, columns[name][start : start + count], count, drawn)


def _sequence(value: Any) -> Any:
    """The inner list of a batch of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value


def _scalar(value: Any) -> Any:
    """The element of a batch of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
