"""The files of a checkpoint: those that a run writes, with what follows from the run and its first model.

The manifest of a checkpoint has the hash of each file, and nothing has the hash of the manifest. So whoever
writes a checkpoint anew can put into it whatever a loader reads: code, pickles, other limits and stop tokens.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...files.bitwise import equal
from ...files.reading import one_line, read_json, shown
from ...files.writing import MANIFEST
from ...model.adapters import AdapterLayout
from ...model.checkpoint_writing import COMPANIONS, STATE_FILE, config_fields, different_companion
from ...model.config import ModelConfig
from ...model.peft import CONFIG, WEIGHTS, adapter_fields, checkpoint_config
from ...model.weight_files import INDEX, open_tensors, tensor_files
from ...model.weights import FlatLayout
from ...verify.difference import first_difference, same_json
from ...verify.ledger import Head
from ..tasks.perfectible import TASK_FILE
from ..train.state import TrainState
from .intact_checkpoints import different_bits
from .ledger_head import run_layout
from .trainer_state import MOMENTS, SMALL_FILE, Checkpoint, read_older

_BASE = "base_model_name_or_path"


def foreign_part(checkpoint: Checkpoint, head: Head) -> str | None:
    """The first file, folder or tensor of an intact checkpoint that no run writes, in words; or None.

    Raises ValueError for a file that cannot be read.
    """
    folder, layout = checkpoint.folder, run_layout(checkpoint_config(checkpoint.folder), head)
    known = {folder / name for name in _written(folder, layout)}
    folders = {folder / "trainer", folder / MOMENTS}
    for path in sorted(folder.rglob("*")):
        is_folder = path.is_dir() and not path.is_symlink()
        if path not in (folders if is_folder else known):
            return f"{one_line(str(path))} is foreign: no run writes it"
    if isinstance(layout, AdapterLayout):
        return None  # reading the adapters has refused other tensors
    wanted = layout.checkpoint_views(torch.empty(layout.numel, device="meta"))
    for name in _tensors(folder):
        if wanted.pop(name, None) is None:
            return f"{folder} holds the tensor {one_line(name)}, which no run writes there"
    return None


def _written(folder: Path, layout: FlatLayout) -> Iterator[str]:
    """The names of the files that a run may write into a checkpoint."""
    yield from (MANIFEST, TASK_FILE, SMALL_FILE, STATE_FILE, *COMPANIONS)
    if isinstance(layout, AdapterLayout):
        yield from (CONFIG, WEIGHTS, "trainer/config.json")
    else:
        yield from ("config.json", INDEX, *tensor_files(folder))
    if (folder / MOMENTS).is_dir():
        yield from (f"{MOMENTS}/{name}" for name in (INDEX, *tensor_files(folder / MOMENTS)))


def _tensors(folder: Path) -> Iterator[str]:
    """The names of all tensors in the files of the weights, whether an index lists them or not."""
    for file in tensor_files(folder):
        with open_tensors(folder / file) as stored:
            yield from stored.keys()


def other_content(checkpoint: Checkpoint, model: Path, head: Head) -> str | None:
    """What of the small files of a checkpoint is not what the run's first model gives; None if all is.

    model: the folder of the first model. Raises ValueError for a file that cannot be read.
    """
    folder, first = checkpoint.folder, ModelConfig.from_file(model)
    if name := different_companion(folder, model):
        return f"its {name} is not the one of {model}"
    layout = run_layout(checkpoint_config(folder), head)
    if not isinstance(layout, AdapterLayout):
        return _other_field(folder / "config.json", config_fields(first, torch.float32))
    stored = _object(folder / CONFIG)
    wanted = adapter_fields(layout, stored.get(_BASE, ""))
    return _other_field(folder / CONFIG, wanted) or _other_field(
        folder / "trainer" / "config.json", first.raw
    )


def other_base(checkpoint: Checkpoint, names: set[str]) -> str | None:
    """The model that an adapter's checkpoint says it belongs to, where it is none of `names`; else None."""
    path = checkpoint.folder / CONFIG
    base = _object(path).get(_BASE) if path.exists() else None
    return None if base is None or base in names else shown(base)


def _object(path: Path) -> Mapping[str, Any]:
    values = read_json(path)
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} must hold a JSON object")
    return values


def _other_field(path: Path, wanted: Mapping[str, Any]) -> str | None:
    """The first field of a JSON file that is not as wanted, in words."""
    wrong = first_difference(_object(path), wanted, same_json)
    return wrong and f"{path.name}: {wrong.beside('must be')}"


def other_state(checkpoint: Checkpoint, head: Head, state: TrainState) -> str | None:
    """What of a checkpoint is not what `state`, after the same steps, has; None if all is the same bits.

    Raises ValueError for a file that cannot be read.
    """
    optimizer, older = state.optimizer, state.older_weights
    hashes = {"weights": optimizer.weights.hash().root, "optimizer": optimizer.hash_moments().root}
    if different := different_bits(checkpoint.folder, head, hashes):
        return different
    if older is None:
        return None
    stored = list(read_older(checkpoint, older.lag, state.policy.layout.numel))
    pairs = zip(stored, older.before, strict=True)
    same = all(
        x.version == y.version and all(equal(a.cpu(), b.cpu()) for a, b in zip(x[1:], y[1:], strict=True))
        for x, y in pairs
    )
    return None if same else "weights of earlier steps"
