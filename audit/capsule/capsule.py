"""The file: gzip over JSON lines. The first line is the header; each other one is a line of zerokl's own log.

    {"zerokl_capsule": 1, "sha256": "...", "model": "models/add", "versions": {...}, ...}
    {"prompt_ids": [..], "completion_ids": [..], "logprobs": [..], "trainer_logprobs": [..], ...}

`logprobs` are the sampler's and `trainer_logprobs` the trainer's, where there are any. A JSON number has all
digits of the fp32 number, so it has its bits. sha256 is over the header without it, and the lines.
No pickle is in it, and none is read.
"""

import gzip
import io
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, ValidationError

from ...engine.config.section import Section
from ...files.inputs import read_bytes
from ...files.reading import json_ready, parse_json, shown
from ...files.writing import hash_json, write_whole
from ..conclusion.outcome import Tolerances
from ..config import Band
from ..formats.record import LoggedRollout
from ..frameworks import zerokl

FORMAT = 1
# Bytes of a capsule, and of what it unpacks to: a small file may unpack to a very large one.
MOST_BYTES, _UNPACKED = 1_000_000, 32_000_000


class Drawn(Section):
    """How an engine drew the completions; with the prompts' ids it draws them again."""

    seed: int
    max_tokens: int = Field(ge=1)
    stop_ids: list[NonNegativeInt]


class Bounds(Section):
    """The tolerances that a replay has where it is given none."""

    max_k3: float | None = Field(None, ge=0.0)
    max_abs: float | None = Field(None, ge=0.0)
    band: Band | None = None

    @property
    def tolerances(self) -> Tolerances:
        """As an audit has them."""
        return Tolerances(self.max_k3, self.max_abs, self.band)


class Header(Section):
    """What a capsule says beside its lines."""

    model: str
    """As it was named."""
    sampler: str
    """The engine that drew, or "" for a log."""
    trainer: str
    """The engine that scored, or "" for the log's own column or none."""
    drawn: Drawn | None = None
    dtypes: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, str] = Field(default_factory=dict)
    """Of the engines and of the machine, as "sampler: attention backend"."""
    weights: str = ""
    """SHA-256 over the hashes of all tensors; "" where no model was named."""
    tensors: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)
    bounds: Bounds = Bounds()


@dataclass(frozen=True)
class Capsule:
    """A capsule: its header, and its completions."""

    header: Header
    rollouts: list[LoggedRollout]

    @property
    def has_trainer(self) -> bool:
        """Whether every completion has the trainer's logprobs."""
        return all(rollout.trainer_logprobs is not None for rollout in self.rollouts)


def write_capsule(header: Header, rollouts: Sequence[LoggedRollout], path: Path) -> int:
    """Write a capsule. Returns its bytes. Raises ValueError where it exists, or is larger than a megabyte."""
    if path.exists():
        raise ValueError(f"capsule: {path} exists already; choose another --out")
    head = json_ready(header.model_dump())
    rows = [zerokl.as_row(rollout) for rollout in rollouts]
    whole = {"zerokl_capsule": FORMAT, "sha256": hash_json([head, rows])} | head
    lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in (whole, *rows))
    content = gzip.compress(lines.encode(), mtime=0)
    if len(content) > MOST_BYTES or len(lines) > _UNPACKED:
        raise ValueError(
            f"capsule: {len(rows)} completions make {len(content):,} bytes, and a capsule has at most "
            f"{MOST_BYTES:,}; give a smaller -n"
        )
    write_whole(path, content)
    return len(content)


def read_capsule(path: Path) -> Capsule:
    """Read a capsule. Raises ValueError of one line for a file that is none, or is damaged, and OSError."""
    try:
        head, rows = _lines(_unpacked(read_bytes(path, MOST_BYTES)))
    except ValueError as error:
        raise ValueError(f"capsule: {path} {error}") from None
    if head.pop("zerokl_capsule") != FORMAT:
        raise ValueError(f"capsule: {path} is of another format than {FORMAT}; take the zerokl that wrote it")
    if head.pop("sha256", "") != hash_json([head, rows]):
        raise ValueError(f"capsule: {path} was altered: its SHA-256 is not the one in it")
    try:
        header = Header.model_validate(head)
        rollouts = [rollout for row in rows for rollout in zerokl.parse(row, path)]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"capsule: {path}: {place} ({shown(first['input'])}): {first['msg']}") from None
    except (KeyError, ValueError) as error:
        raise ValueError(f"capsule: {path} has a line that is none of a log: {error}") from None
    if not rollouts or any(rollout.logprobs is None for rollout in rollouts):
        raise ValueError(f"capsule: {path} holds no completion with logprobs")
    return Capsule(header, rollouts)


def _unpacked(content: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            unpacked = file.read(_UNPACKED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"is no capsule, or is damaged ({error})") from None
    if len(unpacked) > _UNPACKED:
        raise ValueError(f"unpacks to more than {_UNPACKED:,} bytes, which are not read")
    return unpacked


def _lines(content: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = [parse_json(line) for line in content.splitlines()]
    if not lines or any(not isinstance(line, dict) for line in lines) or "zerokl_capsule" not in lines[0]:
        raise ValueError("is gzip of something that is no capsule")
    return lines[0], lines[1:]
