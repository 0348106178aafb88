"""A recorder for one's own loop: every completion becomes a line of a log.

with Recorder("log.jsonl", temperature=1.0) as recorder:
    ...
    recorder.record(prompt_ids, completion_ids, logprobs, trainer_logprobs=..., step=step)
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..audit.formats.fields import sampling_params
from ..files.reading import json_ready
from ..files.writing import naming
from ..kernels.sampling_params import PENALTIES, SamplingParams, refuse_penalties

# The other fields of a line; docs/log-format.md has their meaning.
FIELDS = (
    "trainer_logprobs",
    "mask",
    *SamplingParams._fields,
    "weight_version",
    "decimals",
    "trainer_decimals",
    "sampling_mask",
    "routed_experts",
    "reward",
    "advantage",
    "step",
    "prompt",
    "sample",
    "finish_reason",
    "prompt_text",
    "completion_text",
)


def sampling_fields(get: Callable[[str], Any]) -> dict[str, Any]:
    """What a framework's settings say of the distribution that was drawn from, as fields of a line.

    get: a setting by its name in vLLM, None where it is not set. A top_k of -1 keeps all tokens, as 0 does.
    """
    names = (*SamplingParams._fields, *PENALTIES)
    values = {name: value for name in names if (value := get(name)) is not None}
    if isinstance(values.get("top_k"), int):
        values["top_k"] = max(0, values["top_k"])
    return values


class Recorder:
    """Writes a log. Lists, arrays and tensors of any device and dtype are taken; none of them is changed.

    constant: fields that are the same in every line, such as temperature and top_p.
    Raises ValueError for an unknown field, for sampling parameters that no reader takes, for a penalty that
    is not off, and for a file that exists.
    """

    def __init__(self, path: str | Path, **constant: Any):
        self.path = Path(path)
        self._constant = _known(constant)
        try:
            sampling_params({"temperature": 1.0} | {k: _plain(v) for k, v in self._constant.items()})
        except ValueError as error:
            raise ValueError(f"recorder: {error}") from None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = open(self.path, "xb", buffering=0)
        except FileExistsError:
            raise ValueError(f"recorder: {self.path} exists; choose another file") from None

    def record(self, prompt_ids: Any, completion_ids: Any, logprobs: Any = None, **fields: Any) -> None:
        """Write one completion.

        logprobs: the sampler's [C], of the distribution the token was drawn from; NaN or None where one is
        missing, None for all of them. A completion of no token is passed over. Raises ValueError for columns
        of another length than completion_ids.
        """
        row = self.row(prompt_ids, completion_ids, logprobs, **fields)
        if row["completion_ids"]:
            self.write(row)

    def row(
        self, prompt_ids: Any, completion_ids: Any, logprobs: Any = None, **fields: Any
    ) -> dict[str, Any]:
        """The line of a completion. See record."""
        completion = _plain(completion_ids)
        count = len(completion)
        row = {
            "prompt_ids": _plain(prompt_ids),
            "completion_ids": completion,
            "logprobs": [None] * count if logprobs is None else _plain(logprobs),
        }
        row |= {name: _plain(value) for name, value in (self._constant | _known(fields)).items()}
        for name in ("logprobs", "trainer_logprobs", "mask"):
            if row.get(name) is not None and len(row[name]) != count:
                raise ValueError(f"recorder: {name} has {len(row[name])} entries for {count} completion_ids")
        return {name: value for name, value in row.items() if value is not None}

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a line, whole or not at all. Raises OSError that names the log."""
        end = self._file.tell()
        left = memoryview((json.dumps(row, allow_nan=False) + "\n").encode())
        try:
            with naming(self.path):
                while left:  # a disk that is nearly full takes a part
                    left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(end)
            self._file.seek(end)
            raise

    def flush(self) -> None:
        """Put every line on the disk. Raises OSError that names the log."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close the log."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    refuse_penalties("recorder", fields)
    unknown = [name for name in fields if name not in FIELDS and name not in PENALTIES]
    if unknown:
        raise ValueError(f"recorder: field {unknown[0]} is not known; a line takes {', '.join(FIELDS)}")
    return {name: value for name, value in fields.items() if name not in PENALTIES}


def _plain(value: Any) -> Any:
    """A value for JSON. A 16-bit float becomes the equal number; NaN becomes null, infinity its name."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "detach"):  # a tensor; numpy has no bfloat16
        value = value.detach()
        value = (value.float() if value.is_floating_point() else value).cpu().numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(x) for name, x in value.items()}
    if isinstance(value, (int, float)):
        return None if math.isnan(value) else json_ready(value)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [_plain(x) for x in value]
    return value
