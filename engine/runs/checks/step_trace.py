"""Traces of one update of a training step: the output of every operation, in a safetensors file.

`zerokl replay --trace FILE` writes a trace. `zerokl diff` finds the first operation that differs between two
traces.

A file holds these tensors, in the order of computation:

    token_ids [T]
    the trainer's operations (model/operations.py) [T, ...]; after the last layer's keys [S, ...]
    logprob [C]
    gradient.NAME, first_moment.NAME, second_moment.NAME and weight.NAME of each weight, after the update

T rows of the step, ordered by their place (prompt, sample, position); S of them are rows of samples, and C of
these predict a drawn token. A sample's rows go from its prompt's last token to its own last but one. The rows
of a prompt before its last token are computed once for all its samples in a virtual shard, and have the place
of the first of them.

So the rows and their order depend on no setting that decides no bit. The sampler's forwards are the same
operations on the same rows. They are not in the file.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ....files.bitwise import unequal
from ....files.reading import one_line, parse_json
from ....model.config import ModelConfig
from ....model.context import Hook, no_hook
from ....model.operations import in_order, split_fused
from ....model.weight_files import open_tensors
from ....verify.operation_outputs import Trace, first_divergence
from ...train.ledger_recorder import Recorder
from ...train.state import StepRecord, TrainState
from ...train.step import train_step

# Tensors of a file that are no operations. They hold the (prompt, sample, position) of each of the T rows, of
# each of the S rows, and of each of the C drawn tokens.
_PLACES = ("place", "place of samples' rows", "place of drawn tokens")

# Operations whose rows are rows of a weight, not of the tokens.
_WEIGHT_PREFIXES = ("gradient.", "first_moment.", "second_moment.", "weight.")


class _Forward:
    """What one forward of the trainer computed: `outputs` of operations, one row for each of `places`.

    The last, `logprob`, has a row for each of `predicting`.
    """

    def __init__(
        self, ids: torch.Tensor, places: torch.Tensor, predicting: torch.Tensor, config: ModelConfig
    ):
        self.places, self.predicting, self._config = places, places[predicting], config
        self.outputs: Trace = {"token_ids": ids.unsqueeze(1)}

    def hook(self, name: str, x: torch.Tensor) -> None:
        for op, part in split_fused(name, x, self._config).items():
            self.outputs[op] = part.to("cpu", copy=True)


class _Recording:
    """Keeps what update number `update` of a step computes (StepObserver)."""

    def __init__(self, state: TrainState, update: int):
        self._state, self._update = state, update
        self._forwards: list[_Forward] = []
        self._weight_rows: Trace = {}

    def forward(self, update: int, ids: torch.Tensor, places: torch.Tensor, predicting: torch.Tensor) -> Hook:
        if update != self._update:
            return no_hook
        self._forwards.append(_Forward(ids, places, predicting, self._state.policy.config))
        return self._forwards[-1].hook

    def updated(self, update: int, gradient: torch.Tensor) -> None:
        if update != self._update:
            return
        optimizer, views = self._state.optimizer, self._state.optimizer.layout.trained_views
        flats = (gradient, *optimizer.moments, optimizer.weights.master)
        for prefix, flat in zip(_WEIGHT_PREFIXES, flats, strict=True):
            for name, view in views(flat).items():
                self._weight_rows[prefix + name] = view.to("cpu", copy=True).reshape(view.shape[0], -1)

    def trace(self) -> tuple[Trace, list[torch.Tensor]]:
        """The trace, and the tensors of _PLACES."""
        samples = [f for f in self._forwards if len(f.predicting)]
        logprobs = [{"logprob": f.outputs.pop("logprob")} for f in samples]
        place, rows = _in_places([f.places for f in self._forwards], [f.outputs for f in self._forwards])
        sample_place, sample_rows = _in_places([f.places for f in samples], [f.outputs for f in samples])
        predicting, logprob = _in_places([f.predicting for f in samples], logprobs)
        config = self._state.policy.config
        computed = in_order(sample_rows | rows | logprob, config.layers, config)
        operations = {"token_ids": rows["token_ids"]} | computed
        drawn_place = predicting + torch.tensor([0, 0, 1])
        return operations | self._weight_rows, [place, sample_place, drawn_place]


def _in_places(places: Sequence[torch.Tensor], outputs: Sequence[Trace]) -> tuple[torch.Tensor, Trace]:
    """The places of all rows in ascending order [rows, 3], and the operations that all `outputs` have.

    places [n, 3] and outputs [n, ...]: of each forward.
    """
    together = torch.cat(list(places))
    order = torch.from_numpy(np.lexsort(together.numpy().T[::-1]))
    shared = [op for op in outputs[0] if all(op in x for x in outputs)]
    return together[order], {op: torch.cat([x[op] for x in outputs])[order] for op in shared}


def check_trace(state: TrainState, file: Path, update: int = 0) -> None:
    """Raise ValueError where `trace_step` would.

    That is where several processes compute the step, where a step has no such update, and where `file`
    exists.
    """
    if state.parallel.n > 1:
        raise ValueError(
            f"trace: workers ({state.parallel.n}) must be 1: operations of other processes cannot be recorded"
        )
    updates = state.config.updates_per_rollout
    if not 0 <= update < updates:
        raise ValueError(
            f"trace: update ({update}) must lie in 0 to {updates - 1}: a step of this run has "
            f"{updates} (updates_per_rollout)"
        )
    if file.exists():
        raise ValueError(f"trace: {file} already exists; nothing was overwritten")


def trace_step(state: TrainState, recorder: Recorder | None, file: Path, update: int = 0) -> StepRecord:
    """Do the next step and write the trace of one of its updates to `file`.

    recorder: see train_step. update: counts from 0. Raises ValueError (see check_trace).
    """
    check_trace(state, file, update)
    step, recording = state.step, _Recording(state, update)
    record = train_step(state, recorder, recording)
    write_trace(file, *recording.trace(), step, update)
    return record


def write_trace(file: Path, trace: Trace, places: list[torch.Tensor], step: int, update: int) -> None:
    """Write a trace. places: the tensors of _PLACES."""
    metadata = {"zerokl": "trace", "step": str(step), "update": str(update), "order": json.dumps(list(trace))}
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = trace | dict(zip(_PLACES, places, strict=True))
    save_file({name: x.contiguous() for name, x in tensors.items()}, file, metadata)


@dataclass(frozen=True)
class TraceFile:
    """A trace that was read."""

    operations: Trace  # in the order of computation
    places: list[torch.Tensor]  # the tensors of _PLACES
    step: int
    update: int  # of the step, from 0


def trace_differences(a: Path, b: Path) -> tuple[bool, list[str]]:
    """Whether two traces are equal, and what is said of them: the first operation that differs.

    Raises ValueError for a file that is no trace, and for traces of different tokens.
    """
    x, y = read_trace(a), read_trace(b)
    for left, right in ((x.operations["token_ids"], y.operations["token_ids"]), (x.places[0], y.places[0])):
        if left.shape != right.shape or unequal(left, right).any():
            raise ValueError(
                f"trace: {a} and {b} are of different tokens; "
                "`zerokl diff` of the two runs finds their first difference"
            )
    moments = dict.fromkeys(f"step {trace.step}, update {trace.update}" for trace in (x, y))
    lines = ["the traces are of " + " and of ".join(moments)] if len(moments) > 1 else []
    first = first_divergence(x.operations, y.operations)
    if first is None:
        shared = x.operations.keys() & y.operations.keys()
        return True, [*lines, f"equal to the bit: {len(shared)} operations"]
    row = _first_row(first.op, x.operations[first.op], y.operations[first.op], x.places)
    return False, [*lines, f"first difference: {one_line(first.op)}{row}; {first.words}"]


def _first_row(op: str, x: torch.Tensor, y: torch.Tensor, places: list[torch.Tensor]) -> str:
    """The first row of an operation that differs, in words; empty where its rows are not of the tokens."""
    if x.dtype != y.dtype or op.startswith(_WEIGHT_PREFIXES):
        return ""
    rows, sample_rows, drawn_tokens = places
    if op == "logprob":
        place = drawn_tokens
    else:
        place = rows if len(x) == len(rows) else sample_rows
    index = int(unequal(x, y).reshape(len(x), -1).any(1).nonzero()[0])
    return ", prompt {}, sample {}, position {}".format(*place[index].tolist())


def is_trace(path: Path) -> bool:
    """Whether a path looks like a trace and not like a run."""
    return path.is_file() and path.suffix == ".safetensors"


def read_trace(path: Path) -> TraceFile:
    """Read a trace.

    Raises ValueError for a file that cannot be read or is no trace.
    """
    try:
        with open_tensors(path) as file:
            metadata = file.metadata() or {}
            if metadata.get("zerokl") != "trace":
                raise ValueError(f"trace: {path} is no trace of zerokl replay")
            return TraceFile(
                {name: file.get_tensor(name) for name in parse_json(metadata["order"])},
                [file.get_tensor(name) for name in _PLACES],
                int(metadata["step"]),
                int(metadata["update"]),
            )
    except (SafetensorError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"trace: {path} cannot be read ({error})") from None
