"""Traces of one training step: the output of every operation, in a safetensors file, and the first that
differs between two.

In the order of computation, for the rows of the step in canonical order, T in all, C of them of samples: of
each pass the prompts, once for all their samples (model/prompts.py), then the samples, each from its prompt's
last token to its last but one:

    token_ids [T]; every operation of the trainer's forward (audit/names.py) [T, ...], after the last layer's
    keys [C, ...]; logprob [C]; gradient.NAME, first_moment.NAME, second_moment.NAME, weight.NAME of each
    weight

The sampler's forwards are the same operations on the same rows, in an order that decides no bit; they are not
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...model.decoder import Context, Decoder, Hook, no_hook
from ...model.op_names import in_order, split_fused
from ...model.prompts import first_of_prompt, prompt_passes
from ...verify.bitwise import unequal
from ...verify.trace import OpDifference, Trace, compare_traces, first_divergence
from ..parallel.partition import virtual_shards
from ..rollout.types import Rollout
from ..train.state import StepRecord, TrainState
from ..train.step import train_step

# Tensors of a file that are no operations: the (prompt, sample, position) of each of the T rows, of the C
# rows, and of the C drawn tokens.
_PLACES = ("place", "place of samples' rows", "place of drawn tokens")

# Operations that have a row for each of a weight's, not of the tokens.
_OF_WEIGHTS = ("gradient.", "first_moment.", "second_moment.", "weight.")


@contextmanager
def _listening(decoder: Decoder, found: dict[str, list[torch.Tensor]]) -> Iterator[None]:
    """Inside, every forward of the trainer through `decoder` leaves its operations' outputs in `found`,
    without padding rows.
    """

    def listen(plain: Callable) -> Callable:
        def forward(ids: torch.Tensor, context: Context, hook: Hook = no_hook) -> torch.Tensor | None:
            if context.blocks is None:  # the sampler's
                return plain(ids, context, hook)
            T = context.blocks[-1][1]

            def both(name: str, x: torch.Tensor) -> None:
                for op, part in split_fused(name, x.detach()[:T], decoder.config).items():
                    found[op].append(part.clone())
                hook(name, x)

            found["token_ids"].append(ids[:T].clone())
            return plain(ids, context, both)

        return forward

    decoder.hidden, decoder.read = listen(decoder.hidden), listen(decoder.read)
    try:
        yield
    finally:
        del decoder.hidden, decoder.read


def trace_step(state: TrainState, file: Path) -> StepRecord:
    """Do the next step and write its trace.

    Raises ValueError where the step is computed in several processes, or `file` exists.
    """
    if state.parallel.n > 1:
        raise ValueError(
            f"trace: workers ({state.parallel.n}) must be 1: operations of other processes cannot be recorded"
        )
    if file.exists():
        raise ValueError(f"trace: {file} already exists; nothing was overwritten")
    assert state.recorder is not None
    step, found = state.step, defaultdict(list)
    views = state.policy.layout.checkpoint_views

    def updated(logp: torch.Tensor, gradient: torch.Tensor) -> None:
        found["logprob"].append(logp.clone())
        for name, view in views(gradient).items():
            found[f"gradient.{name}"].append(view.clone())

    state.recorder.listener = updated
    with _listening(state.policy, found):
        record = train_step(state)
    state.recorder.listener = None
    trace = {name: torch.cat([x.reshape(x.shape[0], -1) for x in parts]) for name, parts in found.items()}
    forward = in_order(trace, state.policy.config.layers)
    trace = (
        {"token_ids": trace["token_ids"]}
        | forward
        | {name: x for name, x in trace.items() if name.startswith("gradient.")}
    )
    tensors = dict(zip(("first_moment", "second_moment"), state.optimizer.moments, strict=True)) | {
        "weight": state.optimizer.master
    }
    trace |= {f"{what}.{name}": view for what, flat in tensors.items() for name, view in views(flat).items()}
    _write(trace, _places(record.rollouts, state.config.virtual_shards), step, file)
    return record


def _places(rollouts: Sequence[Rollout], shards: int) -> list[torch.Tensor]:
    """See _PLACES. A prompt's rows are named by the first sample that they were computed for."""
    every, samples, drawn = [], [], []
    for shard in virtual_shards(rollouts, shards):
        for at in prompt_passes([r.prompt_ids for r in shard]):
            some = shard[at]
            firsts = compress(some, first_of_prompt([r.prompt_ids for r in some]))
            every += [(r.prompt, r.sample, i) for r in firsts for i in range(len(r.prompt_ids) - 1)]
            own = [
                (r.prompt, r.sample, len(r.prompt_ids) - 1 + i)
                for r in some
                for i in range(len(r.completion_ids))
            ]
            every += own
            samples += own
            drawn += [(prompt, sample, i + 1) for prompt, sample, i in own]
    return [torch.tensor(x) for x in (every, samples, drawn)]


def _write(trace: Trace, places: list[torch.Tensor], step: int, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.contiguous() for k, v in (trace | dict(zip(_PLACES, places, strict=True))).items()},
        file,
        {"zerokl": "trace", "step": str(step), "order": json.dumps(list(trace))},
    )


@dataclass(frozen=True)
class TraceComparison:
    """Two traces:

    their steps, the first operation that differs (None: all are equal), and the first row of it that does.
    """

    steps: tuple[int, int]
    operations: int
    first: OpDifference | None
    row: str = ""


def compare_trace_files(a: Path, b: Path) -> TraceComparison:
    """The first operation that differs.

    Raises ValueError for a file that is no trace, or traces of different tokens.
    """
    (x, places, step_x), (y, _, step_y) = read_trace(a), read_trace(b)
    if x["token_ids"].shape != y["token_ids"].shape or unequal(x["token_ids"], y["token_ids"]).any():
        raise ValueError(
            f"trace: {a} and {b} are of different tokens; `zerokl diff` of the two runs finds where they part"
        )
    differences = compare_traces(x, y)
    first = first_divergence(differences)
    row = _first_row(first.op, x[first.op], y[first.op], places) if first else ""
    return TraceComparison((step_x, step_y), len(differences), first, row)


def _first_row(op: str, x: torch.Tensor, y: torch.Tensor, places: list[torch.Tensor]) -> str:
    every, samples, drawn = places
    if x.dtype != y.dtype or op.startswith(_OF_WEIGHTS):
        return ""
    place = drawn if op == "logprob" else every if len(x) == len(every) else samples
    at = int(unequal(x, y).reshape(len(x), -1).any(1).nonzero()[0])
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
