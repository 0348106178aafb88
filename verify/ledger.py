"""The run ledger: one JSON line a step, each chained to the one before by SHA-256.

    chain_0     = H(head)           head: hashes of configuration, data and first weights; seed
    chain_{n+1} = H(chain_n, line)  line: step, random keys, and the hash of every quantity of the step in causal order

H is SHA-256 over canonical JSON. Chained is what the law says decides bits, and the bits. The environment
(versions, device, threads) is recorded beside it and not chained: two machines that compute the same bits
have the same chain, and where they do not, the environment is what is asked first. `sum` guards all of a
line, chained or not.

The hash of a quantity that has a part for each weight is the root of a hash tree: H over its leaves, one for
each weight. A leaf is H over the hashes of the weight's blocks, so that ranks that keep a part of it each, or
threads, hash it together.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .files import hash_json, whole_lines

# Its name in a run's folder.
LEDGER = "ledger.jsonl"
FORMAT = 4
# Elements of a block; the last one of a weight may be shorter.
BLOCK = 1 << 16
# Hexadecimal digits of a leaf: 128 bits, so that two different weights never share one by chance.
_LEAF = 32


def digest(*arrays: np.ndarray | torch.Tensor) -> str:
    """SHA-256 over dtype, shape and bytes of each array."""
    h = hashlib.sha256()
    for x in arrays:
        h.update(f"{x.dtype} {tuple(x.shape)}\n".encode())
        h.update(_bytes(x))
    return h.hexdigest()


def _bytes(x: np.ndarray | torch.Tensor) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def digest_ids(sequences: Iterable[Sequence[int]]) -> str:
    """The hash of sequences of integers."""
    sequences = list(sequences)
    lengths = np.array([len(s) for s in sequences], np.int64)
    return digest(lengths, np.fromiter((i for s in sequences for i in s), np.int64, int(lengths.sum())))


@dataclass(frozen=True)
class Tree:
    """A quantity with a part for each weight: the hash of all, and that of each."""

    root: str
    leaves: list[str]


# Threads that hash beside the one that asks: hashlib lets others run. What is done by which decides nothing.
_HELPERS = min(8, os.cpu_count() or 1) - 1


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_HELPERS + 1, thread_name_prefix="ledger")  # one more, to wait for the disk


class Hashing:
    """Blocks that other threads have begun to hash; nobody may change the tensors until `digests` returns.

    blocks: the name of its weight, and the block in each of the tensors that make up the quantity.
    """

    def __init__(self, blocks: Iterable[tuple[str, Sequence[torch.Tensor]]]):
        self._blocks = list(blocks)
        self._left, self._done = deque(range(len(self._blocks))), [""] * len(self._blocks)
        self._helpers = [_pool().submit(self._work) for _ in range(_HELPERS)]

    def _work(self) -> None:
        while True:
            try:
                i = self._left.popleft()
            except IndexError:
                return
            self._done[i] = digest(*self._blocks[i][1])

    def digests(self) -> list[tuple[str, str]]:
        """The name of its weight and the hash of each block, with this thread's help."""
        self._work()
        for helper in self._helpers:
            if not helper.cancel():  # it began
                helper.result()
        return [(name, done) for (name, _), done in zip(self._blocks, self._done, strict=True)]


def hash_tree(*parts: Mapping[str, torch.Tensor]) -> Tree:
    """The tree over the weights' names; a leaf hashes that weight's tensor in each of `parts`."""
    flat = ((name, [part[name].reshape(-1).cpu().split(BLOCK) for part in parts]) for name in parts[0])
    return tree_of(Hashing((name, block) for name, cut in flat for block in zip(*cut, strict=True)).digests())


def tree_of(digests: Iterable[tuple[str, str]]) -> Tree:
    """The tree over blocks, of which those of one weight follow each other."""
    by_weight = groupby(digests, key=itemgetter(0))
    leaves = [hash_json([block for _, block in blocks])[:_LEAF] for _, blocks in by_weight]
    return Tree(hash_json(leaves), leaves)


@dataclass
class Line:
    """A step of the ledger."""

    step: int
    keys: dict[str, int]  # what the step's random numbers are keyed by
    quantities: dict[str, str]  # name -> hash, in causal order
    leaves: dict[str, list[str]] = field(
        default_factory=dict
    )  # of those quantities that are trees, as far as detail asks
    notes: dict[str, Any] = field(default_factory=dict)  # recorded, not chained
    chain: str = ""

    def chained(self, before: str) -> str:
        """The chain value of this line after the one `before`."""
        return hash_json([before, self.step, self.keys, list(self.quantities.items())])


@dataclass
class Head:
    """What the run starts from. `settings` are the configuration's keys that decide bits."""

    settings: dict[str, Any]
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
    """A ledger as far as it is intact.

    `damage` says what ended it before the file's end; a torn last line is none: `torn`.
    """

    path: Path
    head: Head | None = None
    lines: list[Line] = field(default_factory=list)
    resumed: list[dict[str, Any]] = field(
        default_factory=list
    )  # {"step", "environment"} of each resumption elsewhere
    ends: list[int] = field(
        default_factory=list
    )  # bytes of the file up to the end of the head, then of each step
    damage: str | None = None
    torn: bool = False

    @property
    def chain(self) -> str:
        """The last chain value: the run's fingerprint."""
        assert self.head is not None
        return self.lines[-1].chain if self.lines else self.head.chain

    def chain_at(self, step: int) -> str | None:
        """The chain value with which `step` began; None when the ledger does not reach it."""
        if self.head is None or not 0 <= step <= len(self.lines):
            return None
        return self.lines[step - 1].chain if step else self.head.chain

    def whole(self) -> "LedgerFile":
        """This ledger. Raises ValueError when it has no head or a damaged line."""
        if self.damage or self.head is None:
            raise ValueError(f"ledger: {self.damage or f'{self.path} holds no ledger'}")
        return self


def read_ledger(path: Path) -> LedgerFile:
    """Read and check every line: JSON, its own sum, the chain, the steps' order, and the leaves under each
    root.

    Raises OSError, and FormatError for a ledger of another version.
    """
    found, at = LedgerFile(path), 0
    lines, found.torn = whole_lines(path.read_bytes())
    for number, raw in enumerate(lines, 1):
        try:
            _take(found, json.loads(raw))
        except _DamageError as error:
            found.damage = f"{path} line {number} {error}"
            break
        except FormatError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):
            found.damage = f"{path} line {number} is no line of a ledger"
            break
        at += len(raw)
        if found.ends and len(found.ends) == len(found.lines) + 1:
            found.ends[-1] = at  # a resumption belongs to the step before it
        else:
            found.ends.append(at)
    return found


class FormatError(ValueError):
    """A ledger that another version wrote."""


class _DamageError(Exception):
    """Why a line cannot be believed."""


def _take(found: LedgerFile, line: dict[str, Any]) -> None:
    if line.pop("sum") != hash_json(line):
        raise _DamageError("was altered: its sum does not fit")
    kind = line.pop("kind")
    if (kind == "head") != (found.head is None):
        raise _DamageError("is a second head" if kind == "head" else "comes before the head")
    if kind == "head":
        head = Head(**line)
        if head.format != FORMAT:
            raise FormatError(
                f"ledger: {found.path} has format {head.format}, this zerokl reads {FORMAT}; use the version that wrote it"
            )
        if head.chain != head.chained() or head.weights != hash_json(head.leaves):
            raise _DamageError("was altered: the chain does not fit")
        found.head = head
    elif kind == "resumed":
        found.resumed.append({"step": line["step"], "environment": line["environment"]})
    else:
        step = Line(**line | {"quantities": dict(line["quantities"])})
        if step.step != len(found.lines):
            raise _DamageError(f"is step {step.step} where step {len(found.lines)} belongs")
        if step.chain != step.chained(found.chain):
            raise _DamageError("was altered: the chain does not fit")
        if any(hash_json(leaves) != step.quantities[name] for name, leaves in step.leaves.items()):
            raise _DamageError("was altered: leaves do not fit their root")
        found.lines.append(step)


class Ledger:
    """A ledger that is being written, from a head or on from a read one.

    A line is in the file when `append` returns, and on the disk before the next one is written or `sync`
    returns: no step waits for it. Without a path nothing is written: `last` is compared, by a replay or with
    the other ranks.
    """

    def __init__(self, path: Path | None, head: Head, found: LedgerFile | None = None):
        self.last: Line | None = None
        self._synced: Future[None] | None = None
        self._file = open(path, "ab") if path is not None else None
        head.chain = head.chained()
        self.chain = head.chain if found is None else found.chain
        if found is None:
            self._write({"kind": "head", **vars(head)})

    def append(self, line: Line) -> None:
        """Chain a step and write it. Raises OSError."""
        line.chain = self.chain = line.chained(self.chain)
        self.last = line
        self._write({"kind": "step", **vars(line), "quantities": list(line.quantities.items())})

    def resumed(self, step: int, environment: Mapping[str, Any]) -> None:
        """Note that the run went on from `step` in another environment. Not chained."""
        self._write({"kind": "resumed", "step": step, "environment": dict(environment)})

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        self.sync()
        self._file.write(json.dumps(line | {"sum": hash_json(line)}, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self._synced = _pool().submit(os.fsync, self._file.fileno())

    def sync(self) -> None:
        """Wait until every line is on the disk. Raises OSError."""
        if self._synced is not None:
            self._synced.result()

    def close(self) -> None:
        """Close the file, every line on the disk."""
        if self._file is not None:
            try:
                self.sync()
            finally:
                self._file.close()
