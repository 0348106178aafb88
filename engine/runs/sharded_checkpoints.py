"""Weights and moments that are spread over ranks, to and from the files of a checkpoint, through DCP.

DCP (torch.distributed.checkpoint) writes what each rank has, and rank 0 joins it on the disk to whole tensors
in safetensors files. So no rank holds a whole weight or moment, and any number of ranks reads its own rows
again. The files are safetensors only: DCP's own format has a pickle, which runs code when it is loaded.

The weights are then the Hugging Face checkpoint that every other run writes. The moments lie in MOMENTS, one
tensor for each weight that is trained. A critic's head, one vector, goes where every other run has it.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...files.writing import os_error_line
from ...model.checkpoint_writing import SHARD_BYTES
from ...model.weight_files import open_tensors, tensor_files
from ...model.weights import FlatLayout
from ..train.parallel.pieces import parts_of
from ..train.parallel.process_group import Ranks
from ..train.sharded_optimizer import ShardedOptimizer

MOMENTS = "trainer/moments"
MOMENT_NAMES = ("first_moment", "second_moment")


def save_sharded(optimizer: ShardedOptimizer, target: Path, ranks: Ranks) -> Path:
    """Write weights and moments to a folder beside `target`, and return it. All ranks call this together.

    It has the folders `weights` and `moments`. Raises OSError in every rank.
    """
    staging = target.with_name(f".{target.name}.partial-sharded")
    ranks.from_first(lambda: staging.mkdir(parents=True))
    _save(staging / "weights", optimizer.master_tensors(), ranks)
    _save(staging / "moments", _by_moment(optimizer), ranks)
    return staging


def place(staging: Path, folder: Path) -> None:
    """Move what save_sharded wrote to the folder of a checkpoint."""
    for file in (staging / "weights").iterdir():
        file.rename(folder / file.name)
    (folder / MOMENTS).parent.mkdir(exist_ok=True)
    (staging / "moments").rename(folder / MOMENTS)
    shutil.rmtree(staging)


def load_sharded(optimizer: ShardedOptimizer, folder: Path, updates: int, ranks: Ranks) -> bool:
    """Put this rank's rows of the weights back, and of the moments where they lie in MOMENTS.

    Returns whether they do. updates: that the weights have had. All ranks call this together.
    """
    optimizer.begin_after(updates)
    _load(folder, optimizer.master_tensors(), ranks)
    has_moments = (folder / MOMENTS).is_dir()
    if has_moments:
        _load(folder / MOMENTS, _by_moment(optimizer), ranks)
    return has_moments


class NamedMoment:
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


def _by_moment(optimizer: ShardedOptimizer) -> dict[str, torch.Tensor]:
    moments = zip(MOMENT_NAMES, optimizer.moment_tensors(), strict=True)
    return {f"{moment}.{name}": x for moment, tensors in moments for name, x in tensors.items()}


def _save(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    import torch.distributed.checkpoint as dcp  # loads for seconds, as FSDP does

    writer = dcp.HuggingFaceStorageWriter(
        str(folder), _files(tensors), save_distributed=True, enable_consolidation=True
    )
    _attempt(folder, lambda: dcp.save(dict(tensors), storage_writer=writer, process_group=ranks.group))
    if ranks.first:
        shutil.rmtree(folder / "sharded")


def _load(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    _attempt(folder, lambda: dcp.load(dict(tensors), storage_reader=reader, process_group=ranks.group))


def _attempt(folder: Path, call: Any) -> None:
    """Raise an OSError of one line for what goes wrong in any rank."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        call()
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = os_error_line(cause) if isinstance(cause, OSError) else f"{type(cause).__name__}: {cause}"
        raise OSError(f"checkpoint: {folder} failed in rank {rank} ({reason.splitlines()[0]})") from None


def _files(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The number of the file that each tensor goes to, from 1 on."""
    numbers, size, number = {}, 0, 1
    for name, x in tensors.items():
        n_bytes = x.numel() * x.element_size()
        if size and size + n_bytes > SHARD_BYTES:
            size, number = 0, number + 1
        numbers[name], size = number, size + n_bytes
    return numbers
