"""Traces of one training step: the output of every operation, in a safetensors file.

`zerokl replay --trace FILE` writes a trace. `zerokl diff` finds the first operation that differs between two
traces.

A file holds these tensors, in the order of computation:

    token_ids [T]
    the operations of the trainer's forward (model/op_names.py) [T, ...]; after the last layer's keys [C, ...]
    logprob [C]
    gradient.NAME, first_moment.NAME, second_moment.NAME and weight.NAME of each weight

T rows of the step, in canonical order; C of them are rows of samples. The rows of a pass are first its
prompts, once for all their samples (model/prompts.py), then its samples. A sample's rows go from its prompt's
last token to its own last but one.

The sampler's forwards are the same operations on the same rows, in an order that decides no bit. They are not
in the file.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ...model.decoder import Context, Decoder, Hook, no_hook
from ...model.op_names import in_order, split_fused
from ...model.prompts import first_of_prompt, prompt_passes
from ...verify.bitwise import unequal
from ...verify.inputs import open_tensors
from ...verify.reading import parse_json
from ...verify.trace import OpDifference, Trace, compare_traces, first_divergence
from ..parallel.partition import virtual_shards
from ..rollout.types import Rollout
from ..train.state import StepRecord, TrainState
from ..train.step import train_step

# Tensors of a file that are no operations. They hold the (prompt, sample, position) of each of the T rows, of
# each of the C rows, and of each of the C drawn tokens.
_PLACES = ("place", "place of samples' rows", "place of drawn tokens")

# Operations whose rows are rows of a weight, not of the tokens.
_OF_WEIGHTS = ("gradient.", "first_moment.", "second_moment.", "weight.")


@contextmanager
def _recording(decoder: Decoder, outputs: dict[str, list[torch.Tensor]]) -> Iterator[None]:
    """Inside, every forward of the trainer through `decoder` adds its operations' outputs to `outputs`.

    Padding rows are left out.
    """

    def recorded(plain: Callable) -> Callable:
        def forward(ids: torch.Tensor, context: Context, hook: Hook = no_hook) -> torch.Tensor | None:
            if context.blocks is None:  # a forward of the sampler
                return plain(ids, context, hook)
            T = context.blocks[-1][1]

            def record(name: str, x: torch.Tensor) -> None:
                for op, part in split_fused(name, x.detach()[:T], decoder.config).items():
                    outputs[op].append(part.clone())
                hook(name, x)

            outputs["token_ids"].append(ids[:T].clone())
            return plain(ids, context, record)

        return forward

    decoder.hidden, decoder.read = recorded(decoder.hidden), recorded(decoder.read)
    try:
        yield
    finally:
        del decoder.hidden, decoder.read


def trace_step(state: TrainState, file: Path) -> StepRecord:
    """Do the next step and write its trace to `file`.

    Raises ValueError where several processes compute the step, and where `file` exists.
    """
    if state.parallel.n > 1:
        raise ValueError(
            f"trace: workers ({state.parallel.n}) must be 1: operations of other processes cannot be recorded"
        )
    if file.exists():
        raise ValueError(f"trace: {file} already exists; nothing was overwritten")
    assert state.recorder is not None
    step, outputs = state.step, defaultdict(list)
    views = state.policy.layout.checkpoint_views

    def record_update(logp: torch.Tensor, gradient: torch.Tensor) -> None:
        outputs["logprob"].append(logp.clone())
        for name, view in views(gradient).items():
            outputs[f"gradient.{name}"].append(view.clone())

    state.recorder.listener = record_update
    with _recording(state.policy, outputs):
        record = train_step(state)
    state.recorder.listener = None
    trace = {name: torch.cat([x.reshape(x.shape[0], -1) for x in parts]) for name, parts in outputs.items()}
    trace = (
        {"token_ids": trace["token_ids"]}
        | in_order(trace, state.policy.config.layers)
        | {name: x for name, x in trace.items() if name.startswith("gradient.")}
    )
    first_moment, second_moment = state.optimizer.moments
    updated = {
        "first_moment": first_moment,
        "second_moment": second_moment,
        "weight": state.optimizer.master,
    }
    trace |= {f"{what}.{name}": view for what, flat in updated.items() for name, view in views(flat).items()}
    _write(trace, _places(record.rollouts, state.config.virtual_shards), step, file)
    return record


def _places(rollouts: Sequence[Rollout], shards: int) -> list[torch.Tensor]:
    """The tensors of _PLACES. A prompt's rows carry the first sample that they were computed for."""
    rows, sample_rows, drawn_tokens = [], [], []
    for shard in virtual_shards(rollouts, shards):
        for pass_slice in prompt_passes([r.prompt_ids for r in shard]):
            group = shard[pass_slice]
            firsts = compress(group, first_of_prompt([r.prompt_ids for r in group]))
            rows += [(r.prompt, r.sample, i) for r in firsts for i in range(len(r.prompt_ids) - 1)]
            places = [
                (r.prompt, r.sample, len(r.prompt_ids) - 1 + i)
                for r in group
                for i in range(len(r.completion_ids))
            ]
            rows += places
            sample_rows += places
            drawn_tokens += [(prompt, sample, position + 1) for prompt, sample, position in places]
    return [torch.tensor(x) for x in (rows, sample_rows, drawn_tokens)]


def _write(trace: Trace, places: list[torch.Tensor], step: int, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.contiguous() for k, v in (trace | dict(zip(_PLACES, places, strict=True))).items()},
        file,
        {"zerokl": "trace", "step": str(step), "order": json.dumps(list(trace))},
    )


@dataclass(frozen=True)
class TraceComparison:
    """What `compare_trace_files` finds."""

    steps: tuple[int, int]
    operations: int  # compared
    first: OpDifference | None  # the first operation that differs; None where all are equal
    row: str = ""  # the first row of that operation that differs, in words


def compare_trace_files(a: Path, b: Path) -> TraceComparison:
    """The first operation that differs between two traces.

    Raises ValueError for a file that is no trace, and for traces of different tokens.
    """
    (x, places, step_x), (y, _, step_y) = read_trace(a), read_trace(b)
    if x["token_ids"].shape != y["token_ids"].shape or unequal(x["token_ids"], y["token_ids"]).any():
        raise ValueError(
            f"trace: {a} and {b} are of different tokens; "
            "`zerokl diff` of the two runs finds their first difference"
        )
    differences = compare_traces(x, y)
    first = first_divergence(differences)
    row = _first_row(first.op, x[first.op], y[first.op], places) if first else ""
    return TraceComparison((step_x, step_y), len(differences), first, row)


def _first_row(op: str, x: torch.Tensor, y: torch.Tensor, places: list[torch.Tensor]) -> str:
    """The first row of an operation that differs, in words; empty where its rows are not of the tokens."""
    if x.dtype != y.dtype or op.startswith(_OF_WEIGHTS):
        return ""
    rows, sample_rows, drawn_tokens = places
    if op == "logprob":
        place = drawn_tokens
    else:
        place = rows if len(x) == len(rows) else sample_rows
    index = int(unequal(x, y).reshape(len(x), -1).any(1).nonzero()[0])
    return "prompt {}, sample {}, position {}".format(*place[index].tolist())


def is_trace(path: Path) -> bool:
    """Whether a path looks like a trace and not like a run."""
    return path.is_file() and path.suffix == ".safetensors"


def read_trace(path: Path) -> tuple[Trace, list[torch.Tensor], int]:
    """(operations in the order of computation, tensors of _PLACES, step).

    Raises ValueError for a file that cannot be read or is no trace.
    """
    try:
        with open_tensors(path) as file:
            metadata = file.metadata() or {}
            if metadata.get("zerokl") != "trace":
                raise ValueError(f"trace: {path} is no trace of zerokl replay")
            return (
                {name: file.get_tensor(name) for name in parse_json(metadata["order"])},
                [file.get_tensor(name) for name in _PLACES],
                int(metadata["step"]),
            )
    except (SafetensorError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"trace: {path} cannot be read ({error})") from None
