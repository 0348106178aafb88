"""Logs that hold text and no token ids: verl's rollout_data_dir, and TRL's completions.

`zerokl diff` compares them. An audit refuses them: a text does not say which tokens were drawn.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...files.inputs import check_input
from . import fields
from .record import LoggedRollout


def recognises_verl(row: dict[str, Any]) -> bool:
    """Whether a line is one of verl's rollout_data_dir/STEP.jsonl."""
    return {"input", "output", "score"} <= row.keys()


def parse_verl(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The completion of a line. Raises ValueError, or KeyError with a field."""
    yield LoggedRollout(
        prompt_text=fields.text("input", row["input"]),
        completion_text=fields.text("output", row["output"]),
        reward=fields.optional_number("score", row["score"]),
        step=fields.optional_integer("step", row.get("step")),
        sample=fields.label("uid", row.get("uid")),
    )


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet file, with their places. Raises ValueError without pyarrow."""
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(f"{path} is a Parquet file; pip install pyarrow to read it") from None
    try:
        check_input(path)
        file = ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    number = 0
    for batch in file.iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", row


def recognises_trl(row: dict[str, Any]) -> bool:
    """Whether a row is one of TRL's completions."""
    return {"step", "prompt", "completion", "advantage"} <= row.keys()


def parse_trl(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The completion of a row. Raises ValueError, or KeyError with a field.

    Each reward has a column of its own; where there is one, it is the reward.
    """
    rewards = [
        value
        for name, value in row.items()
        if name not in ("step", "prompt", "completion", "advantage") and type(value) in (int, float)
    ]
    yield LoggedRollout(
        prompt_text=_said(row["prompt"]),
        completion_text=_said(row["completion"]),
        reward=rewards[0] if len(rewards) == 1 else None,
        advantage=fields.optional_number("advantage", row["advantage"]),
        step=fields.optional_integer("step", row["step"]),
    )


def _said(value: Any) -> str:
    """A text, or the messages of a chat one after the other."""
    if isinstance(value, list):
        return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in value if isinstance(m, dict))
    return str(value)
