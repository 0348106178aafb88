"""prime-rl's trainer: token_exports/step_N/rank_N.jsonl, one line for each sequence, both columns in it.

Every list has an entry for each token of the sequence, the prompt's included. All digits are there, and a
number that is not finite is null. The file says nothing about the temperature.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import fields
from .aligned import Aligned
from .record import LoggedRollout

_SCHEMA = 1


def recognises(row: dict[str, Any]) -> bool:
    """Whether a line is an exported sequence."""
    return {"token_ids", "loss_mask", "inference_logprobs"} <= row.keys()


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The sequence of a line; none where no token was drawn. Raises ValueError, or KeyError with a field."""
    schema = fields.integer("schema_version", row.get("schema_version"), _SCHEMA)
    if schema != _SCHEMA:
        raise ValueError(
            f"schema_version ({schema}) must be {_SCHEMA}, the one that zerokl knows; write the lines in "
            "zerokl's own format (docs/log-format.md)"
        )
    ids = fields.token_ids("token_ids", row["token_ids"])
    aligned = Aligned("token_ids", ids, "loss_mask", _drawn(row))
    if not aligned.completion_ids:
        return
    yield LoggedRollout(
        prompt_ids=aligned.prompt_ids,
        completion_ids=aligned.completion_ids,
        logprobs=aligned.logprobs("inference_logprobs", row["inference_logprobs"]),
        trainer_logprobs=aligned.logprobs("trainer_logprobs", row.get("trainer_logprobs"), trainer=True),
        mask=aligned.mask,
        advantage=aligned.advantage("advantages", row.get("advantages")),
        step=fields.optional_integer("step", row.get("step")),
    )


def _drawn(row: dict[str, Any]) -> list:
    """The loss mask without the tokens of a frozen model: the policy's components have no weight on them.

    A weight of null is the default: 1 of `rl_weights`, 0 of `ref_kl_weights`.
    """
    mask = fields.listed("loss_mask", row["loss_mask"], "0 and 1")
    nulls = [None] * len(mask)
    weights = [row.get(name) or nulls for name in ("rl_weights", "ref_kl_weights")]
    if any(not isinstance(w, list) or len(w) != len(mask) for w in weights):
        raise ValueError(f"rl_weights and ref_kl_weights must have an entry for each of {len(mask)} tokens")
    return [m if rl != 0 or ref not in (0, None) else 0 for m, rl, ref in zip(mask, *weights, strict=True)]
