"""The rollouts of a run, packed for the page: blocks of rows, each gzipped, unpacked when a person looks.

A block has two parts. The index holds what is sorted and filtered by, in columns. The texts hold prompts,
completions and tokens. So a page with 100,000 rollouts unpacks numbers at first, and texts a block at a time.
"""

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....files.inputs import input_lines, open_input
from ....files.reading import json_ready
from ...train.metrics import CUT
from ..rollout_lines import parse_rollout
from .examples import PromptHistory

BLOCK_ROWS = 1024
# A report keeps this many rollouts at most, and reads this many bytes of the file at most.
MAX_ROLLOUTS, MAX_BYTES = 200_000, 512 << 20
_STEP_PREFIX = b'{"step": '


def pack(x: Any) -> bytes:
    """x as gzipped JSON, with the same bytes each time."""
    content = json.dumps(x, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return gzip.compress(content.encode("utf-8", "replace"), 6, mtime=0)


@dataclass(frozen=True)
class Block:
    """Packed rows of a run."""

    rows: int
    index: bytes
    texts: bytes


class RolloutLog:
    """rollouts.jsonl of a run, read as far as it is written.

    `read` can be called again and again: it goes on where it stopped. The blocks that are full never change.
    """

    def __init__(self, file: Path):
        self.file, self.blocks, self.ids = file, [], set()
        self.history = PromptHistory()
        self.damage = ""  # why reading stopped before the end
        self._steps = _chosen_steps(file)
        self._offset, self._rows = 0, []
        self.left_out = 0

    @property
    def rows(self) -> int:
        """Rows that were read."""
        return sum(block.rows for block in self.blocks) + len(self._rows)

    def read(self) -> None:
        """Read the lines that are new. A last line that is still being written waits for the next call."""
        if not self.file.exists() or self.damage:
            return
        if self.file.stat().st_size < self._offset:  # a resumed run has cut its files back
            self.blocks, self._rows, self._offset = [], [], 0
            self.history = PromptHistory()
        with open_input(self.file) as lines:
            lines.seek(self._offset)
            for line in input_lines(lines, self.file):
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._add(line)
                if self.damage:
                    break

    def _add(self, line: bytes) -> None:
        if self._is_left_out(_step(line)):
            self.left_out += 1
            return
        try:
            row = parse_rollout(line)
            is_answer = "budget" in row  # to a reasoning, which is shown in its place
            kept = {name: row[name] for name in _NAMES} | {"advantage": _advantage(row["advantage"])}
            optional = {"trainer": row.get("trainer_logprobs"), "mask": row.get("mask")}
            row = kept | optional | {"turns": _turns(row), "error": str(row.get("error", ""))}
            _check(row)
        except (ValueError, KeyError, TypeError) as error:
            self.damage = f"{self.file} has a line that is no rollout ({type(error).__name__}: {error})"
            return
        self.ids.update(row["completion_ids"])
        if not is_answer:
            self.history.add(row)
        self._rows.append(row)
        if len(self._rows) == BLOCK_ROWS:
            self.blocks.append(_block(self._rows))
            self._rows = []

    def _is_left_out(self, step: int | None) -> bool:
        """Whether the step is not kept. Steps that came after the choice are kept."""
        if self._steps is None or step is None:
            return False
        chosen, last = self._steps
        return step <= last and step not in chosen

    def all_blocks(self) -> list[Block]:
        """The full blocks, and one with the rows after them."""
        return [*self.blocks, _block(self._rows)] if self._rows else list(self.blocks)


_NAMES = (
    "step",
    "prompt",
    "sample",
    "problem",
    "prompt_text",
    "text",
    "reward",
    "advantage",
    "finish",
    "completion_ids",
    "logprobs",
)


def _advantage(value: Any) -> Any:
    """The advantage of a completion; the mean of those of its tokens, where each has its own."""
    return _mean(_drawn(value)) if isinstance(value, list) else value


def _turns(row: dict[str, Any]) -> list[list[float]] | None:
    """For each turn in an environment the place of its first token in completion_ids, and its reward."""
    if "turn_rewards" not in row:
        return None
    before = len(row["prompt_ids"])
    starts = [start - before for start in row.get("turn_starts", [before])]
    if not all(map(_is_number, [*starts, *row["turn_rewards"]])):
        raise ValueError("turn_starts and turn_rewards must be numbers")
    return [[start, _short(r)] for start, r in zip(starts, row["turn_rewards"], strict=True)]


def _check(row: dict[str, Any]) -> None:
    """Raise ValueError for a row that cannot be shown, because a field is not what a run writes."""
    if not all(type(row[name]) is str for name in ("prompt_text", "text", "finish")):
        raise ValueError("prompt_text, text and finish must be texts")
    if not all(type(row[name]) is int for name in ("step", "prompt", "sample", "problem")):
        raise ValueError("step, prompt, sample and problem must be whole numbers")
    if not all(_is_number(row[name]) for name in ("reward", "advantage")):
        raise ValueError("reward and advantage must be numbers")
    ids, sampler, trainer = row["completion_ids"], row["logprobs"], row["trainer"]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise ValueError("completion_ids must be token ids")
    drawn = row["mask"] or [1] * len(ids)
    for column in (sampler, *([] if trainer is None else [trainer])):
        if not isinstance(column, list) or not len(column) == len(drawn) == len(ids):
            raise ValueError("logprobs and mask must have an entry for each token")
        if not all(_is_number(x) if d else x is None for x, d in zip(column, drawn, strict=True)):
            raise ValueError("logprobs must be a number for each drawn token, and null for the others")


def _is_number(x: Any) -> bool:
    return type(x) is float or (type(x) is int and x.bit_length() < 64)


def _step(line: bytes) -> int | None:
    """The step of a line as zerokl writes it; None for another line."""
    number = line[len(_STEP_PREFIX) : line.find(b",")] if line.startswith(_STEP_PREFIX) else b""
    return int(number) if number.isdigit() else None


def _chosen_steps(file: Path) -> tuple[frozenset[int], int] | None:
    """The steps to keep of a file that is too large, evenly spaced, and the last step of the file.

    None: all.
    """
    if not file.exists():
        return None
    counts: dict[int | None, int] = {}
    with open_input(file) as lines:
        for line in input_lines(lines, file):
            step = _step(line)
            counts[step] = counts.get(step, 0) + 1
    share = max(sum(counts.values()) / MAX_ROLLOUTS, file.stat().st_size / MAX_BYTES)
    steps = sorted(step for step in counts if step is not None)
    if share <= 1 or len(steps) < 2:
        return None
    keep = max(2, int(len(steps) / share))
    chosen = frozenset(steps[round(i * (len(steps) - 1) / (keep - 1))] for i in range(keep))
    return chosen, steps[-1]


def _block(rows: list[dict[str, Any]]) -> Block:
    index = {
        "step": [row["step"] for row in rows],
        "prompt": [row["prompt"] for row in rows],
        "sample": [row["sample"] for row in rows],
        "reward": [_short(row["reward"]) for row in rows],
        "advantage": [_short(row["advantage"]) for row in rows],
        "length": [len(_drawn(row["logprobs"])) for row in rows],
        "cut": [int(row["finish"] in CUT) for row in rows],
        "logprob": [_short(_mean(_drawn(row["logprobs"]))) for row in rows],
        "mismatch": [_short(_largest(row)) for row in rows],
    }
    prompts: dict[str, int] = {}
    texts = {
        "prompt": [prompts.setdefault(row["prompt_text"], len(prompts)) for row in rows],
        "problem": [row["problem"] for row in rows],
        "text": [row["text"] for row in rows],
        "ids": [row["completion_ids"] for row in rows],
        "logprobs": [[_short(x) for x in row["logprobs"]] for row in rows],
        "differences": [
            row["trainer"] and [_short(None if t is None else t - s) for t, s in _columns(row)]
            for row in rows
        ],
        "turns": [row["turns"] for row in rows],
        "finish": [row["finish"] for row in rows],
        "error": [row["error"] for row in rows],
        "prompts": list(prompts),
    }
    return Block(len(rows), pack(index), pack(texts))


def _short(x: float | None) -> float | str | None:
    """x with four significant digits, which is enough to look at. The page reads the names of infinities."""
    return None if x is None or math.isnan(x) else json_ready(float(f"{x:.4g}"))


def _drawn(logprobs: list[float | None]) -> list[float]:
    """Those of the drawn tokens; the others have none."""
    return [x for x in logprobs if x is not None]


def _columns(row: dict[str, Any]) -> Iterator[tuple[float | None, float | None]]:
    """The logprob of trainer and sampler of each token; None twice for a token that was not drawn."""
    return zip(row["trainer"], row["logprobs"], strict=True)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _largest(row: dict[str, Any]) -> float | None:
    """The largest |trainer - sampler| of a row; None where the row has no logprobs of the trainer."""
    if not row["trainer"]:
        return None
    return max(abs(t - s) for t, s in _columns(row) if t is not None)
