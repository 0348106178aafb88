"""Traces of one training step: the output of every operation, in a safetensors file, and the first that differs between two.

In the order of computation, for the sequences of the step in canonical order, T tokens in all, C of them drawn:

    token_ids [T]; every operation of the trainer's forward (audit/names.py) [T, ...]; logprob [C]; gradient.NAME, first_moment.NAME,
    second_moment.NAME, weight.NAME of each weight

The sampler's forwards are the same operations on the same rows, in an order that decides no bit; they are not in the file.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..model.decoder import Context, Decoder, PackedContext, Tap, ignore
from ..verify.bitwise import unequal
from ..verify.trace import OpDifference, Trace, compare_traces, first_divergence
from .audit.engines import split_fused
from .audit.names import in_order
from .loop import StepRecord, TrainState, train_step

# Tensors of a file that are no operations: the (prompt, sample, position) of each row of T and of C.
_PLACES = ("place", "place of drawn tokens")


@contextmanager
def _listening(decoder: Decoder, found: dict[str, list[torch.Tensor]]) -> Iterator[None]:
    """Inside, every forward of the trainer through `decoder` leaves its operations' outputs in `found`, without filler rows."""
    plain = decoder.hidden

    def hidden(ids: torch.Tensor, context: Context, tap: Tap = ignore) -> torch.Tensor:
        if not isinstance(context, PackedContext):
            return plain(ids, context, tap)
        T = context.blocks[-1][1]

        def both(name: str, x: torch.Tensor) -> None:
            for op, part in split_fused(name, x.detach()[:T], decoder.config).items():
                found[op].append(part.clone())
            tap(name, x)

        found["token_ids"].append(ids[:T].clone())
        return plain(ids, context, both)

    decoder.hidden = hidden
    try:
        yield
    finally:
        del decoder.hidden


def trace_step(state: TrainState, file: Path) -> StepRecord:
    """Do the next step and write its trace. Raises ValueError where the step is computed in several processes, or `file` exists."""
    if state.workers.n > 1:
        raise ValueError(f"trace: workers ({state.workers.n}) must be 1: operations of other processes cannot be recorded")
    if file.exists():
        raise ValueError(f"trace: {file} already exists; nothing was overwritten")
    assert state.ledger is not None
    step, found = state.step, defaultdict(list)
    views = state.policy.layout.checkpoint_views

    def updated(logp: torch.Tensor, gradient: torch.Tensor) -> None:
        found["logprob"].append(logp.clone())
        for name, view in views(gradient).items():
            found[f"gradient.{name}"].append(view.clone())

    state.ledger.listener = updated
    with _listening(state.policy, found):
        record = train_step(state)
    state.ledger.listener = None
    trace = {name: torch.cat([x.reshape(x.shape[0], -1) for x in parts]) for name, parts in found.items()}
    forward = in_order(trace, state.policy.config.layers)
    trace = {"token_ids": trace["token_ids"]} | forward | {name: x for name, x in trace.items() if name.startswith("gradient.")}
    tensors = dict(zip(("first_moment", "second_moment"), state.learner.moments, strict=True)) | {"weight": state.learner.master}
    trace |= {f"{what}.{name}": view for what, flat in tensors.items() for name, view in views(flat).items()}
    _write(trace, record, step, file)
    return record


def _write(trace: Trace, record: StepRecord, step: int, file: Path) -> None:
    rows, drawn = [], []
    for r in record.rollouts:
        n = len(r.prompt_ids)
        rows += [(r.prompt, r.sample, i) for i in range(n + len(r.completion_ids) - 1)]
        drawn += [(r.prompt, r.sample, i) for i in range(n, n + len(r.completion_ids))]
    places = dict(zip(_PLACES, (torch.tensor(rows), torch.tensor(drawn)), strict=True))
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.contiguous() for k, v in (trace | places).items()},
        file,
        {"zerokl": "trace", "step": str(step), "order": json.dumps(list(trace))},
    )


@dataclass(frozen=True)
class TraceComparison:
    """Two traces: their steps, the first operation that differs (None: all are equal), and the first row of it that does."""

    steps: tuple[int, int]
    operations: int
    first: OpDifference | None
    row: str = ""


def compare_trace_files(a: Path, b: Path) -> TraceComparison:
    """The first operation that differs. Raises ValueError for a file that is no trace, or traces of different tokens."""
    (x, places, step_x), (y, _, step_y) = read_trace(a), read_trace(b)
    if x["token_ids"].shape != y["token_ids"].shape or unequal(x["token_ids"], y["token_ids"]).any():
        raise ValueError(f"trace: {a} and {b} are of different tokens; `zerokl diff` of the two runs finds where they part")
    differences = compare_traces(x, y)
    first = first_divergence(differences)
    row = _first_row(x[first.op], y[first.op], places) if first else ""
    return TraceComparison((step_x, step_y), len(differences), first, row)


def _first_row(x: torch.Tensor, y: torch.Tensor, places: list[torch.Tensor]) -> str:
    place = next((p for p in places if len(p) and len(x) % len(p) == 0), None)
    if place is None or x.dtype != y.dtype:
        return ""
    at = int(unequal(x, y).reshape(len(x), -1).any(1).nonzero()[0]) % len(place)
    return "prompt {}, sample {}, position {}".format(*place[at].tolist())


def is_trace(path: Path) -> bool:
    """Whether a path looks like a trace and not like a run."""
    return path.is_file() and path.suffix == ".safetensors"


def read_trace(path: Path) -> tuple[Trace, list[torch.Tensor], int]:
    """(operations in the order of computation, places of rows, step). Raises ValueError."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("zerokl") != "trace":
                raise ValueError(f"trace: {path} is no trace of zerokl replay")
            return (
                {name: file.get_tensor(name) for name in json.loads(about["order"])},
                [file.get_tensor(n) for n in _PLACES],
                int(about["step"]),
            )
    except (SafetensorError, KeyError, OSError) as error:
        raise ValueError(f"trace: {path} cannot be read ({error})") from None
