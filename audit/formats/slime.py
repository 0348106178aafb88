"""slime and miles: --save-debug-rollout-data and --save-debug-train-data, a .pt of plain values and tensors.

The file is opened with weights_only, which runs no code. Where a dump holds other objects, this fails, and
`zerokl convert` prints what to run in slime's own environment.
"""

import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...files.inputs import check_input
from . import fields
from .record import LoggedRollout


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The samples of a dump, with their places.

    Raises ValueError for a file that does not open safely, and where torch is not installed: no other format
    needs it.
    """
    try:
        import torch
    except ImportError:
        raise ValueError(f"{path} is a file of torch's; pip install torch to read it") from None
    try:
        check_input(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{path} holds more than tensors and plain values ({reason}); "
            f"`zerokl convert {path} --format slime` prints what to run in slime's environment"
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get("samples"), list):
        raise ValueError(f"{path} is no dump of slime: it has no list of samples")
    for index, sample in enumerate(content["samples"]):
        place = f"sample {index}"
        if not isinstance(sample, dict):
            raise ValueError(f"{path}, {place}: is no dictionary")
        yield place, {"rollout_id": content.get("rollout_id")} | {k: _plain(v) for k, v in sample.items()}


def _plain(value: Any) -> Any:
    """A tensor as lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def recognises(row: dict[str, Any]) -> bool:
    """Whether a row is a sample of slime; a copy of it in JSON lines is one, too."""
    return "tokens" in row and ("response_length" in row or "response_lengths" in row)


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The sample of a row; none without a response. Raises ValueError, or KeyError with a field.

    A dump of rollouts and one of training have other names for some fields.
    """
    ids = fields.token_ids("tokens", row["tokens"])
    count = fields.integer("response_length", _either(row, "response_length", "response_lengths"))
    if not 0 <= count < len(ids):
        raise ValueError(f"response_length ({count}) must lie in 0 .. {len(ids) - 1}, below the tokens")
    if count == 0:
        return
    drawn = fields.mask("loss_mask", _either(row, "loss_mask", "loss_masks"), count)
    completion = ids[-count:]
    yield LoggedRollout(
        prompt_ids=ids[:-count],
        completion_ids=completion,
        logprobs=_column(row, "rollout_log_probs", count, drawn),
        trainer_logprobs=_column(row, "log_probs", count, drawn),
        mask=drawn,
        weight_span=_span(row.get("weight_versions")),
        sampling_mask=_kept(row, completion, drawn),
        reward=row["reward"] if type(row.get("reward")) in (int, float) else None,
        step=fields.optional_integer("rollout_id", row.get("rollout_id")),
        prompt=fields.label("group_index", row.get("group_index")),
        sample=fields.label("index", _either(row, "index", "sample_index")),
        truncated=fields.truncated("status", row.get("status")),
    )


def _either(row: dict[str, Any], name: str, other: str) -> Any:
    return row[name] if row.get(name) is not None else row.get(other)


def _column(row: dict[str, Any], name: str, count: int, drawn: Any) -> Any:
    return (
        None if row.get(name) is None else fields.logprobs(name, row[name], count, drawn, name == "log_probs")
    )


def _span(versions: Any) -> tuple[int, int] | None:
    """slime names weights by texts, one for each request; numbers are kept."""
    if (
        not isinstance(versions, list)
        or not versions
        or not all(str(version).isdecimal() for version in versions)
    ):
        return None
    numbers = [int(version) for version in versions]
    return min(numbers), max(numbers)


def _kept(row: dict[str, Any], completion: Any, drawn: Any) -> Any:
    """The ids that top-p kept for each token; a token that was not drawn has none."""
    ids, offsets = row.get("rollout_top_p_token_ids"), row.get("rollout_top_p_token_offsets")
    if ids is None or offsets is None:
        return None
    ids = fields.listed("rollout_top_p_token_ids", ids, "token ids")
    offsets = fields.listed("rollout_top_p_token_offsets", offsets, "offsets")
    if not offsets or set(map(type, offsets)) != {int} or min(offsets) < 0:
        raise ValueError("rollout_top_p_token_offsets must be a list of offsets that is not empty")
    if len(offsets) != len(completion) + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
        raise ValueError("rollout_top_p_token_offsets do not fit the response and the ids")
    kept = [ids[a:b] or None for a, b in pairwise(offsets)]
    kept = [k if drawn is None or drawn[i] else None for i, k in enumerate(kept)]
    return fields.sampling_mask("rollout_top_p_token_ids", kept, completion)
