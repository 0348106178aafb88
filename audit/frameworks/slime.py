"""slime and miles: --save-debug-rollout-data and --save-debug-train-data, a .pt of plain values and tensors.

| dump | written by | samples are |
| --- | --- | --- |
| of rollouts | slime, miles | `samples`, a dictionary each |
| of training | slime after 0.3.1 | the same |
| of training, of one rank | slime to 0.3.1, miles | `rollout_data`, a dictionary of columns |

A rank of context parallelism has a slice of each response alone; its dump is refused. The file is opened with
weights_only, which runs no code. Where a dump holds other objects, this fails, and `zerokl convert` prints
what to run in slime's own environment.
"""

import math
import pickle
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...files.inputs import check_input
from ...verify.mismatch import mean
from ..figures.gates import Columns, Gate
from ..formats import fields, unknown
from ..formats.framework import Framework, Log, having
from ..formats.pickles import PickledError
from ..formats.record import LoggedRollout

_SLICES = (
    "a rank of context parallelism holds a slice of each response; dump with --context-parallel-size 1, or "
    "with a slime after 0.3.1, which joins the slices"
)
_OTHERS = "of the folders of --dump-details, train_data and rollout_data have samples"

_SCRIPT = '''"""A dump of slime or miles (--save-debug-rollout-data or -train-data) as plain values.

python SCRIPT INPUT.pt OUT.jsonl; then zerokl audit OUT.jsonl --format slime
"""

import json
import sys

import torch

NAMES = (
    "tokens",
    "response_length",
    "response_lengths",
    "loss_mask",
    "loss_masks",
    "rollout_log_probs",
    "log_probs",
    "weight_versions",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "reward",
    "local_raw_reward",
    "rewards",
    "advantages",
    "group_index",
    "index",
    "sample_index",
    "sample_indices",
)


def samples(dump):
    """The samples: a list of them, or, of one rank, columns with an entry for each."""
    if "samples" in dump:
        return dump["samples"]
    if dump.get("cp_size", 1) != 1:
        sys.exit(
            "a rank of context parallelism has a slice of each response; dump with --context-parallel-size 1"
        )
    data = dump["rollout_data"]
    columns = {name: data[name] for name in NAMES if data.get(name) is not None}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def plain(value):
    """A value that JSON does not have: a tensor or an array as a list, anything else as a text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


dump = torch.load(sys.argv[1], map_location="cpu", weights_only=False)
with open(sys.argv[2], "x") as out:
    for sample in samples(dump):
        row = {name: sample[name] for name in NAMES if sample.get(name) is not None}
        print(json.dumps(row | {"rollout_id": dump["rollout_id"]}, default=plain), file=out)
'''


def rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The samples of a dump, with their places.

    Raises PickledError for a file that does not open safely, and where torch is not installed: no other
    format needs it. Raises ValueError for what is no dump.
    """
    content = _opened(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no dump of slime: it holds a {type(content).__name__}; {_OTHERS}")
    if (ranks := _plain(content.get("cp_size"))) not in (None, 1):
        raise ValueError(f"{path}: cp_size is {ranks}: {_SLICES}")
    columns = content.get("rollout_data")
    if isinstance(columns, dict) and "tokens" in columns:
        samples = _transposed(columns)
    elif isinstance(content.get("samples"), list):
        samples = content["samples"]
    else:
        raise ValueError(f"{path} is no dump of slime; {_OTHERS}; {unknown.remedy(content)}")
    for index, sample in enumerate(samples):
        place = f"sample {index}"
        if not isinstance(sample, dict):
            raise ValueError(f"{path}, {place}: is no dictionary")
        if "tokens" not in sample:
            raise ValueError(f"{path}, {place}: has no tokens; {_OTHERS}")
        # A sample of slime may have a rollout_id of its own, which counts samples.
        yield place, {k: _plain(v) for k, v in sample.items()} | {"rollout_id": content.get("rollout_id")}


def _opened(path: Path) -> Any:
    """The content of a file of torch's, opened without running code in it."""
    try:
        import torch
    except ImportError:
        raise _closed(path, "is a file of torch's; pip install torch to read it") from None
    try:
        check_input(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        other = re.search(r"GLOBAL (\S+)", str(error))
        named = f" ({other[1]})" if other else ""
        raise _closed(path, f"holds more than tensors and plain values{named}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = re.split(r"\. |\n", str(error).strip())[0]
        raise ValueError(f"{path} is no whole file of torch's ({reason})") from None


def _closed(path: Path, reason: str) -> PickledError:
    remedy = f"`zerokl convert {path} --format slime` prints what to run in slime's environment"
    return PickledError(f"{path} {reason}", remedy, "slime")


def _transposed(columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The samples of a rank. What has not one entry for each is of the whole batch, and is left out."""
    count = _length(columns.get("tokens"))
    per_sample = {name: column for name, column in columns.items() if count and _length(column) == count}
    for index in range(count or 0):
        yield {name: column[index] for name, column in per_sample.items()}


def _length(column: Any) -> int | None:
    return len(column) if isinstance(column, list | tuple) or getattr(column, "ndim", 0) else None


def _plain(value: Any) -> Any:
    """A tensor as lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def parse(row: dict[str, Any], path: Path) -> Iterator[LoggedRollout]:
    """The sample of a row; none without a response. Raises ValueError, or KeyError with a field.

    A dump of rollouts and one of training have other names for some fields.
    """
    ids = fields.token_ids("tokens", row["tokens"])
    count = fields.integer("response_length", _first(row, "response_length", "response_lengths"))
    if not 0 <= count < len(ids):
        raise ValueError(f"response_length ({count}) must lie in 0 .. {len(ids) - 1}, below the tokens")
    if count == 0:
        return
    drawn = fields.mask("loss_mask", _first(row, "loss_mask", "loss_masks"), count)
    completion = ids[-count:]
    reward = _first(row, "reward", "local_raw_reward", "rewards")
    yield LoggedRollout(
        prompt_ids=ids[:-count],
        completion_ids=completion,
        logprobs=_column(row, "rollout_log_probs", count, drawn),
        trainer_logprobs=_column(row, "log_probs", count, drawn),
        mask=drawn,
        weight_span=_span(row.get("weight_versions")),
        sampling_mask=_kept(row, completion, drawn),
        reward=reward if type(reward) in (int, float) else None,
        advantage=fields.advantage("advantages", row.get("advantages"), count),
        step=fields.optional_integer("rollout_id", row.get("rollout_id")),
        prompt=fields.label("group_index", row.get("group_index")),
        sample=fields.label("index", _first(row, "index", "sample_index", "sample_indices")),
        truncated=fields.truncated("status", row.get("status")),
    )


def _first(row: dict[str, Any], *names: str) -> Any:
    """The first of the fields that the row has; None where it has none."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def _column(row: dict[str, Any], name: str, count: int, drawn: Any) -> Any:
    values = row.get(name)
    if isinstance(values, list) and len(values) < count:
        raise ValueError(f"has {len(values)} {name} for a response of {count} tokens: {_SLICES}")
    return fields.optional_logprobs(name, values, count, drawn)


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


def _abs_of_completions(c: Columns) -> float:
    size, ends = np.abs(c.d), np.cumsum(c.lengths).tolist()
    parts = pairwise((0, *ends))
    return mean(np.array([math.fsum(size[a:b].tolist()) / (b - a) for a, b in parts]))


FRAMEWORK = Framework(
    name="slime",
    title="slime, miles",
    page="slime.md",
    source="slime 0.3.1, `slime/utils/types.py`",
    logs=(
        Log(
            name="slime",
            file="the `.pt` of `--save-debug-train-data` or `--save-debug-rollout-data`",
            switch="`--save-debug-train-data`",
            recognises=having("tokens response_length", "tokens response_lengths"),
            parse=parse,
            fields={
                "completion_ids": "`tokens`, of which the last `response_length` are the completion",
                "mask": "`loss_mask`",
                "logprobs": "`rollout_log_probs`, not rounded",
                "trainer_logprobs": "`log_probs`, in the dump of training only",
                "weight_span": "`weight_versions`, oldest to newest of the sample; only versions that are "
                "numbers are read",
                "sampling_mask": "`rollout_top_p_token_ids` and `rollout_top_p_token_offsets`",
                "step prompt sample": "`rollout_id` of the dump, `group_index`, `index`; of training "
                "`sample_index`",
                "reward": "`reward`; of training `local_raw_reward`, or `rewards`, which are normalised for "
                "GRPO and its like",
                "advantage": "`advantages`, of training only",
                "truncated": "`status`",
            },
            marks=("tokens",),
            rows=rows,
            magic=b"PK",
        ),
    ),
    script=_SCRIPT,
    gate=Gate(
        _abs_of_completions,
        "train_rollout_logprob_abs_diff",
        "the mean of |d| of a completion, over completions",
        0.1,
        may_reach=True,
        source="the default of `--ci-train-rollout-logprob-abs-diff-threshold`",
    ),
)
