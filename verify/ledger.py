"""The run ledger: one JSON line a step, each chained to the one before by SHA-256.

    chain_0     = H(head)           head: hashes of configuration, data and first weights; seed
    chain_{n+1} = H(chain_n, line)  line: step, random keys, the hash of every quantity of the step in causal
                                    order, and the number of updates that the weights have had

H is SHA-256 over canonical JSON. The chain holds the settings that decide bits, by the law, and the bits
themselves. The environment (versions, device, threads) is recorded beside the chain and is not part of it. So
two machines that compute the same bits have the same chain. If the chains differ, the environment is asked
first. `sum` guards the whole line, chained or not.

A quantity may have a part for each weight. Its hash is then the root of a hash tree: H over its leaves, one
for each weight. A leaf is SHA-256 over dtype, length and digest of each of the weight's blocks. A block's
digest is 128 bits of integer sums (kernels/block_digest.py), which a GPU makes where the weight lies. So
several threads, or several ranks that each keep a part of the weight, can hash it together, and nothing is
copied whole to the host.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files.inputs import read_bytes
from ..files.reading import parse_json
from ..files.writing import check_in_place, hash_json, naming, whole_lines
from .run_files import LEDGER as LEDGER

if TYPE_CHECKING:
    import torch

FORMAT = 6
# Hexadecimal digits of a leaf: 128 bits, so that two different weights never share one by chance.
_LEAF = 32


def digest(*arrays: "np.ndarray | torch.Tensor") -> str:
    """SHA-256 over the dtype, the shape and the bytes of each array."""
    h = hashlib.sha256()
    for x in arrays:
        h.update(f"{x.dtype} {tuple(x.shape)}\n".encode())
        h.update(_bytes(x))
    return h.hexdigest()


def _bytes(x: "np.ndarray | torch.Tensor") -> np.ndarray:
    if not isinstance(x, np.ndarray | np.generic):
        import torch  # whoever compares two logs has no tensor, and may have no torch

        return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def digest_ids(sequences: Iterable[Sequence[int]]) -> str:
    """The hash of sequences of integers."""
    sequences = list(sequences)
    lengths = np.array([len(s) for s in sequences], np.int64)
    return digest(lengths, np.fromiter((i for s in sequences for i in s), np.int64, int(lengths.sum())))


@dataclass(frozen=True)
class Tree:
    """The hash of a quantity that has a part for each weight: the root, and one leaf for each weight."""

    root: str
    leaves: list[str]


@cache
def _disk() -> ThreadPoolExecutor:
    """The thread that waits for the disk."""
    return ThreadPoolExecutor(1, thread_name_prefix="ledger")


def tree_of(parts: Iterable[tuple[str, bytes]]) -> Tree:
    """The tree over (name of a weight, what is hashed of it). The parts of one weight follow each other."""
    leaves = [
        hashlib.sha256(b"".join(text for _, text in weight)).hexdigest()[:_LEAF]
        for _, weight in groupby(parts, key=itemgetter(0))
    ]
    return Tree(hash_json(leaves), leaves)


@dataclass
class Line:
    """A step of the ledger."""

    step: int
    keys: dict[str, int]  # the keys of the step's random numbers
    quantities: dict[str, str]  # name -> hash, in causal order
    # Of the quantities that are trees, as far as the setting ledger.detail asks for them.
    leaves: dict[str, list[str]] = field(default_factory=dict)
    updates: int = 0  # of the weights, from the run's first step on; a skipped one does not count
    notes: dict[str, Any] = field(default_factory=dict)  # recorded, not chained
    chain: str = ""

    def chained(self, before: str) -> str:
        """The chain value of this line. `before` is the chain value of the line before it."""
        return hash_json([before, self.step, self.keys, list(self.quantities.items()), self.updates])


@dataclass
class Head:
    """What the run starts from."""

    settings: dict[str, Any]  # the keys of the configuration that decide bits
    seed: int
    data: str
    weights: str
    names: list[str]  # of the weights, in the order of the leaves
    leaves: list[str]  # of the first weights
    environment: dict[str, Any]
    format: int = FORMAT
    chain: str = ""

    def chained(self) -> str:
        """The chain's first value. The environment has no part in it."""
        return hash_json([self.format, hash_json(self.settings), self.seed, self.data, self.weights])


@dataclass
class LedgerFile:
    """A ledger, as far as its file is intact."""

    path: Path
    head: Head | None = None
    lines: list[Line] = field(default_factory=list)
    # {"step", "environment"} of each time that the run went on in another environment.
    resumed: list[dict[str, Any]] = field(default_factory=list)
    # Bytes of the file up to the end of the head, and then up to the end of each step.
    ends: list[int] = field(default_factory=list)
    damage: str | None = None  # the reason why reading stopped before the end of the file
    torn: bool = False  # the last line has no newline, which is no damage

    @property
    def chain(self) -> str:
        """The last chain value: the run's fingerprint."""
        assert self.head is not None
        return self.lines[-1].chain if self.lines else self.head.chain

    @property
    def environment(self) -> dict[str, Any]:
        """The environment in which the run was last started."""
        return self.starts[-1][1]

    @property
    def starts(self) -> list[tuple[int, dict[str, Any]]]:
        """(step, environment) of each start of the run in another environment than before."""
        assert self.head is not None
        return [(0, self.head.environment), *((r["step"], r["environment"]) for r in self.resumed)]

    def chain_at(self, step: int) -> str | None:
        """The chain value at the start of `step`; None if the ledger does not reach this step."""
        if self.head is None or not 0 <= step <= len(self.lines):
            return None
        return self.lines[step - 1].chain if step else self.head.chain

    def whole(self) -> "LedgerFile":
        """This ledger. Raises ValueError when the ledger has no head, or a damaged line."""
        if self.damage or self.head is None:
            raise ValueError(f"ledger: {self.damage or f'{self.path} holds no ledger'}")
        return self


def read_ledger(path: Path) -> LedgerFile:
    """Read a ledger, and check every line.

    A line must be JSON. It must fit its own sum, the chain and the order of the steps. Its leaves must fit
    their roots. Raises OSError, and FormatError for a ledger of another version.
    """
    ledger, end = LedgerFile(path), 0
    lines, ledger.torn = whole_lines(read_bytes(path))
    for number, line in enumerate(lines, 1):
        try:
            _add_line(ledger, parse_json(line))
        except _DamageError as error:
            ledger.damage = f"{path} line {number} {error}"
            break
        except FormatError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):
            ledger.damage = f"{path} line {number} is not a line of a ledger"
            break
        end += len(line)
        if ledger.ends and len(ledger.ends) == len(ledger.lines) + 1:
            ledger.ends[-1] = end  # the line of a resumption belongs to the step before it
        else:
            ledger.ends.append(end)
    return ledger


class FormatError(ValueError):
    """A ledger that was written by another version."""


class _DamageError(Exception):
    """The reason why a line cannot be trusted."""


def _add_line(ledger: LedgerFile, line: dict[str, Any]) -> None:
    """Check a line, and add it to the ledger. Raises FormatError, or another error for a damaged line."""
    if line.pop("sum") != hash_json(line):
        raise _DamageError("was altered: its sum does not fit")
    kind = line.pop("kind")
    if (kind == "head") != (ledger.head is None):
        raise _DamageError("is a second head" if kind == "head" else "comes before the head")
    if kind == "head":
        head = Head(**line)
        if head.format != FORMAT:
            raise FormatError(
                f"ledger: {ledger.path} has format {head.format}, this zerokl reads {FORMAT}; "
                "use the version that wrote it"
            )
        if head.chain != head.chained() or head.weights != hash_json(head.leaves):
            raise _DamageError("was altered: the chain does not fit")
        ledger.head = head
    elif kind == "resumed":
        ledger.resumed.append({"step": line["step"], "environment": line["environment"]})
    else:
        step = Line(**line | {"quantities": dict(line["quantities"])})
        if step.step != len(ledger.lines):
            raise _DamageError(f"is step {step.step}, where step {len(ledger.lines)} belongs")
        if step.chain != step.chained(ledger.chain):
            raise _DamageError("was altered: the chain does not fit")
        if any(hash_json(leaves) != step.quantities[name] for name, leaves in step.leaves.items()):
            raise _DamageError("was altered: leaves do not fit their root")
        ledger.lines.append(step)


class Ledger:
    """A ledger that is being written: a new one, or the continuation of `previous`, which was read.

    A line is in the file when `append` returns. It is on the disk before the next line is written, or when
    `sync` returns, so that no step waits for the disk. Without a path nothing is written: then a replay, or a
    comparison of the ranks, reads `last`.
    """

    def __init__(self, path: Path | None, head: Head, previous: LedgerFile | None = None):
        self.last: Line | None = None
        self._synced: Future[None] | None = None
        self._path, self._file = path, open(path, "ab") if path is not None else None
        head.chain = head.chained()
        self.chain = head.chain if previous is None else previous.chain
        if previous is None:
            self._write({"kind": "head", **vars(head)})

    def append(self, line: Line) -> None:
        """Chain a step and write it. Raises OSError."""
        line.chain = self.chain = line.chained(self.chain)
        self.last = line
        self._write({"kind": "step", **vars(line), "quantities": list(line.quantities.items())})

    def resumed(self, step: int, environment: Mapping[str, Any]) -> None:
        """Note that the run went on from `step` in another environment. The note is not chained."""
        self._write({"kind": "resumed", "step": step, "environment": dict(environment)})

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        self.sync()
        with naming(self._path):
            self._file.write(
                json.dumps(line | {"sum": hash_json(line)}, separators=(",", ":")).encode() + b"\n"
            )
            self._file.flush()
        self._synced = _disk().submit(os.fsync, self._file.fileno())

    def sync(self) -> None:
        """Wait until every line is on the disk, under the file's name. Raises OSError."""
        self._wait()
        if self._file is not None:
            check_in_place(self._file, self._path)

    def _wait(self) -> None:
        if self._synced is not None:
            with naming(self._path):
                self._synced.result()

    def close(self) -> None:
        """Close the file, after every line is on the disk."""
        if self._file is not None:
            try:
                self._wait()
            finally:
                self._file.close()
