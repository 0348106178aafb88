"""The trainer's state in the files of a checkpoint: written, and put back to the bit.

RUN/checkpoints/step-NNNNNN is a Hugging Face checkpoint with the fp32 master weights, after NNNNNN steps. Its
folder trainer/ holds the optimizer's moments (safetensors) and the rest of what a step reads (JSON). Loading
a checkpoint never runs code from it.

Of weights that are whole in every rank, rank 0 collects and writes all. Of weights that FSDP has sharded, DCP
(torch.distributed.checkpoint) writes what each rank has, and rank 0 joins it on the disk to whole tensors. So
no rank holds a whole weight or moment. The files are safetensors only: DCP's own format has a pickle, which
runs code when it is loaded. The moments then lie in MOMENTS, one tensor for each weight that is trained, and
else flat in STATE_FILE. Any number of ranks, of either form, reads its part of either.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ...files.writing import os_error_line
from ...model.adapters import AdapterLayout
from ...model.checkpoint import read_weights
from ...model.checkpoint_writing import SHARD_BYTES, STATE_FILE, write_checkpoint, write_config, write_folder
from ...model.peft import read_adapter, write_adapter
from ...model.weight_files import open_tensors, tensor_files
from ...model.weights import FlatLayout
from ...verify.ledger import Ledger
from ...verify.run_files import checkpoint_folders
from ..rollout.older_weights import Snapshot
from ..train.loss_scaling import LossScaler
from ..train.parallel.pieces import parts_of
from ..train.parallel.process_group import Ranks
from ..train.sharded_weights import ShardedWeights
from ..train.state import TrainState

SMALL_FILE = "trainer/state.json"
MOMENTS = "trainer/moments"
MOMENT_NAMES = ("first_moment", "second_moment")
# Before the names of the weights of earlier steps in STATE_FILE (rollout/older_weights.py).
_OLDER = "older_weights"


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint, made after `step` steps of its run.

    chain: the last chain value of the run's ledger at that time. scaler: the state of the loss scaler. logs:
    file name -> SHA-256 of metrics and rollouts at that time. older_versions: of the weights of the steps
    before, oldest first, that a lagged sampler draws with next.
    """

    folder: Path
    step: int
    version: int
    updates: int
    chain: str
    scaler: dict[str, float]
    logs: dict[str, str]
    older_versions: list[int]


def save_checkpoint(
    state: TrainState,
    ledger: Ledger,
    target: Path,
    companions: Path,
    extra: dict[str, str],
    logs: dict[str, str],
) -> None:
    """Write everything that a resumed run needs, and delete old checkpoints (config.checkpoint.keep).

    ledger: of the run; a checkpoint is never ahead of it on the disk. companions: the folder whose tokenizer
    and chat files are copied. extra: further files, name -> text. logs: see Checkpoint. All ranks must call
    this together; rank 0 writes.

    Raises OSError. Then no part of the new checkpoint is left.
    """
    sharded = isinstance(state.optimizer.weights, ShardedWeights)
    collected = (_save_rows if sharded else _collect)(state, target)
    if not state.ranks.first:
        return
    ledger.sync()
    before = state.older_weights.before if state.older_weights else []
    small = {
        "step": state.step,
        "version": state.version,
        "updates": state.optimizer.updates,
        "chain": ledger.chain,
        "scaler": state.scaler.state,
        "logs": logs,
        "older_versions": [snapshot.version for snapshot in before],
    }
    texts = extra | {SMALL_FILE: json.dumps(small, indent=1) + "\n"}
    collected.write(state, target, companions, texts)
    _drop_old(state, target)


@dataclass(frozen=True)
class _Whole:
    """What rank 0 holds of all ranks: what is trained, [layout.numel], and further tensors by their names."""

    trained: torch.Tensor
    beside: dict[str, torch.Tensor]

    def write(self, state: TrainState, target: Path, companions: Path, texts: dict[str, str]) -> None:
        layout, model = state.optimizer.layout, state.config.model
        if isinstance(layout, AdapterLayout):
            base = str(companions.absolute()) if model.startswith("init:") else model
            write_adapter(target, layout, self.trained, base, companions, texts, self.beside)
        else:
            write_checkpoint(target, layout, self.trained, companions, texts, state=self.beside)


@dataclass(frozen=True)
class _Spread:
    """What lies on the disk already, in the folders `weights` and `moments` of `staging`."""

    staging: Path
    beside: dict[str, torch.Tensor]

    def write(self, state: TrainState, target: Path, companions: Path, texts: dict[str, str]) -> None:
        def fill(folder: Path) -> None:
            for file in (self.staging / "weights").iterdir():
                file.rename(folder / file.name)
            (folder / MOMENTS).parent.mkdir(exist_ok=True)
            (self.staging / "moments").rename(folder / MOMENTS)
            shutil.rmtree(self.staging)
            write_config(folder, state.optimizer.layout.config, torch.float32)

        write_folder(target, fill, companions, texts, self.beside or None)


def _collect(state: TrainState, target: Path) -> _Whole | None:
    """None in ranks other than 0."""
    optimizer = state.optimizer
    trained, moments = optimizer.weights.collect(), optimizer.collect_moments()
    if not state.ranks.first:
        return None
    tensors = dict(zip(MOMENT_NAMES, moments, strict=True)) | optimizer.layout.beside_checkpoint(trained)
    before = state.older_weights.before if state.older_weights else []
    return _Whole(trained, tensors | _older_tensors(before))


def _save_rows(state: TrainState, target: Path) -> _Spread:
    """Write weights and moments of all ranks to a folder beside `target`. Raises OSError in every rank."""
    weights, ranks = state.optimizer.weights, state.ranks
    staging = target.with_name(f".{target.name}.partial-sharded")
    ranks.from_first(lambda: staging.mkdir(parents=True))
    _save(staging / "weights", weights.tensors(), ranks)
    moments = zip(MOMENT_NAMES, map(weights.placed, state.optimizer.moments), strict=True)
    by_name = {f"{moment}.{name}": x for moment, tensors in moments for name, x in tensors.items()}
    _save(staging / "moments", by_name, ranks)
    return _Spread(staging, weights.collect_beside())


def _save(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    import torch.distributed.checkpoint as dcp  # loads for seconds, as FSDP does
    from torch.distributed.checkpoint.api import CheckpointException

    writer = dcp.HuggingFaceStorageWriter(
        str(folder), _files(tensors), save_distributed=True, enable_consolidation=True
    )
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=ranks.group)
    except CheckpointException as error:  # an OSError of one line for what goes wrong in any rank
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = os_error_line(cause) if isinstance(cause, OSError) else f"{type(cause).__name__}: {cause}"
        raise OSError(f"checkpoint: {folder} failed in rank {rank} ({reason.splitlines()[0]})") from None
    if ranks.first:
        shutil.rmtree(folder / "sharded")


def _files(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The number of the file that each tensor goes to, from 1 on."""
    numbers, size, number = {}, 0, 1
    for name, x in tensors.items():
        n_bytes = x.numel() * x.element_size()
        if size and size + n_bytes > SHARD_BYTES:
            size, number = 0, number + 1
        numbers[name], size = number, size + n_bytes
    return numbers


def _drop_old(state: TrainState, target: Path) -> None:
    """Delete the oldest checkpoints beside `target`, so that config.checkpoint.keep are left."""
    keep = state.config.checkpoint.keep  # 0 keeps all
    for folder in checkpoint_folders(target.parent.parent)[keep:] if keep else []:
        # Renamed first, so that a half-deleted folder does not look like a checkpoint.
        dropped = folder.with_name(f".{folder.name}.dropped")
        folder.rename(dropped)
        shutil.rmtree(dropped)


def read_trained(folder: Path, layout: FlatLayout) -> torch.Tensor:
    """What a checkpoint holds of the run's weights, [layout.numel] fp32: the adapters, or the whole model.

    Raises ValueError (see read_adapter, read_weights, _read_beside).
    """
    if isinstance(layout, AdapterLayout):
        return read_adapter(folder, layout)
    flat = read_weights(folder, layout)
    for name, tensor in _read_beside(folder, layout).items():
        layout.beside_checkpoint(flat)[name].copy_(tensor)
    return flat


def _read_beside(folder: Path, layout: FlatLayout) -> dict[str, torch.Tensor]:
    """What a checkpoint holds beside the model, in STATE_FILE: a critic's head, where the run has one.

    Raises ValueError for a checkpoint without it.
    """
    path, tensors = folder / STATE_FILE, {}
    for name, like in layout.beside_checkpoint(torch.empty(layout.numel, device="meta")).items():
        try:
            with open_tensors(path) as stored:
                tensor = stored.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"checkpoint: {path} holds no {name} ({error})") from None
        if tensor.shape != like.shape or tensor.dtype != torch.float32:
            raise ValueError(f"checkpoint: {path}: {name} is of another model")
        tensors[name] = tensor
    return tensors


@contextmanager
def stored_moments(folder: Path, layout: FlatLayout) -> Iterator[list[Any]]:
    """The moments in a checkpoint, [layout.trained_numel] fp32 each, which can be read slice by slice.

    They are in STATE_FILE, or, of weights that FSDP had sharded, in MOMENTS. Raises ValueError where they are
    of another model.
    """
    path = folder / STATE_FILE
    if (folder / MOMENTS).is_dir():
        yield [_NamedMoment(folder, layout, moment) for moment in MOMENT_NAMES]
        return
    try:
        with open_tensors(path) as stored:
            parts = [stored.get_slice(name) for name in MOMENT_NAMES]
            for part, name in zip(parts, MOMENT_NAMES, strict=True):
                if part.get_shape() != [layout.trained_numel] or part.get_dtype() != "F32":
                    raise ValueError(f"checkpoint: {path}: {name} is of another model")
            yield parts
    except SafetensorError as error:
        raise ValueError(f"checkpoint: {path} is no optimizer state ({error})") from None


def _older_tensors(before: Sequence[Snapshot]) -> dict[str, torch.Tensor]:
    """What STATE_FILE holds of the weights of earlier steps. A tensor with two names is there once."""
    tensors = {}
    for i, snapshot in enumerate(before):
        tensors[f"{_OLDER}.{i}.sampled"] = snapshot.sampled.cpu()
        if snapshot.scored is not snapshot.sampled:
            tensors[f"{_OLDER}.{i}.scored"] = snapshot.scored.cpu()
    return tensors


def read_older(checkpoint: Checkpoint, lag: int, numel: int) -> Iterator[Snapshot]:
    """The weights of the steps before a checkpoint, oldest first.

    Raises ValueError where they are not those of `lag` steps, as far as there were so many, or not of a model
    of `numel` weights.
    """
    path, versions = checkpoint.folder / STATE_FILE, checkpoint.older_versions
    if len(versions) != min(lag, checkpoint.step):
        raise ValueError(
            f"checkpoint: {path} holds the weights of {len(versions)} earlier steps, and a lag of {lag} "
            f"steps after {checkpoint.step} needs {min(lag, checkpoint.step)}"
        )
    try:
        with open_tensors(path) as stored:
            for i, version in enumerate(versions):
                sampled = stored.get_tensor(f"{_OLDER}.{i}.sampled")
                name = f"{_OLDER}.{i}.scored"
                scored = stored.get_tensor(name) if name in stored.keys() else sampled  # noqa: SIM118
                if sampled.shape != (numel,) or scored.shape != (numel,):
                    raise ValueError(f"checkpoint: {path}: the weights of earlier steps are of another model")
                yield Snapshot(version, sampled, scored)
    except SafetensorError as error:
        raise ValueError(f"checkpoint: {path} lacks weights of earlier steps ({error})") from None


class _NamedMoment:
    """A moment in MOMENTS, read as if it were flat over what is trained, [layout.trained_numel] fp32."""

    def __init__(self, folder: Path, layout: FlatLayout, moment: str):
        """Raises ValueError where the tensors are of another model."""
        self._layout, self._moment = layout, moment
        self._file_of = {
            name: folder / MOMENTS / file
            for file, names in tensor_files(folder / MOMENTS).items()
            for name in names
        }
        for part in parts_of(layout.trained, 0, 1):
            if self._name(part.name) not in self._file_of:
                raise ValueError(f"checkpoint: {folder / MOMENTS} holds no {moment} of {part.name}")

    def _name(self, weight: str) -> str:
        return f"{self._moment}.{weight}"

    def __getitem__(self, wanted: slice) -> torch.Tensor:
        """Some elements. What lies between the weights is zero."""
        start, stop, _ = wanted.indices(self._layout.trained_numel)
        flat = torch.zeros(stop - start)
        for part in parts_of(self._layout.trained, 0, 1):
            a, b = max(part.start, start), min(part.stop, stop)
            if a >= b:
                continue
            width = (part.stop - part.start) // (part.rows.stop - part.rows.start)
            first, end = (a - part.start) // width, -(-(b - part.start) // width)
            name = self._name(part.name)
            with open_tensors(self._file_of[name]) as stored:
                tensor = stored.get_slice(name)
                if tensor.get_shape()[0] != part.rows.stop or tensor.get_dtype() != "F32":
                    raise ValueError(f"checkpoint: {self._file_of[name]}: {name} is of another model")
                rows = tensor[first:end].reshape(-1)
            from_first = part.start + first * width
            flat[a - start : b - start] = rows[a - from_first : b - from_first]
        return flat


@torch.no_grad()
def restore(state: TrainState, checkpoint: Checkpoint) -> None:
    """Put weights, optimizer, loss scale and counters back.

    Raises ValueError when the files do not fit the model.
    """
    optimizer, older, folder = state.optimizer, state.older_weights, checkpoint.folder
    if older is not None:
        older.reset(read_older(checkpoint, older.lag, state.policy.layout.numel))
    if isinstance(optimizer.weights, ShardedWeights):
        optimizer.weights.read(folder, _read_beside(folder, optimizer.layout))
    else:
        optimizer.weights.load(read_trained(folder, optimizer.layout))
    with stored_moments(folder, optimizer.layout) as moments:
        slices_of_moments = [stored[optimizer.slices.own] for stored in moments]
        optimizer.load_moments(slices_of_moments, checkpoint.updates)
    state.scaler.load(checkpoint.scaler)
    _begin_at(state, checkpoint.step, checkpoint.version)


@torch.no_grad()
def rewind(state: TrainState, master: torch.Tensor) -> None:
    """Put the state back to before the first step. master: the first weights, [layout.numel] fp32."""
    optimizer, place = state.optimizer, state.optimizer.slices.own
    optimizer.weights.load(master)
    optimizer.load_moments([torch.zeros(place.stop - place.start)] * len(MOMENT_NAMES), 0)
    if state.older_weights is not None:
        state.older_weights.reset()
    state.scaler.load(LossScaler(state.config.precision, state.policy.dtype).state)
    _begin_at(state, 0, 0)


def _begin_at(state: TrainState, step: int, version: int) -> None:
    state.step, state.version = step, version
    state.sampler.sync_weights(version)
