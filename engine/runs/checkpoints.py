"""Checkpoints from which a run goes on: saved whole, checked by their hashes, restored to the bit.

RUN/checkpoints/step-NNNNNN is a Hugging Face checkpoint with the fp32 master weights, after NNNNNN steps. Its
folder trainer/ holds the optimizer's moments (safetensors) and the rest of what a step reads (JSON). Loading
a checkpoint never runs code from it.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError

from ...files.reading import read_json, shown
from ...files.writing import manifest_damage
from ...model.adapters import AdapterLayout
from ...model.checkpoint import read_weights
from ...model.checkpoint_writing import STATE_FILE, write_checkpoint, write_config, write_folder
from ...model.peft import checkpoint_config, read_adapter, write_adapter
from ...model.weight_files import open_tensors
from ...model.weights import FlatLayout
from ...verify.ledger import Head, Ledger, LedgerFile
from ...verify.run_files import checkpoint_folders
from ..config.run_config import Config
from ..rollout.older_weights import Snapshot
from ..tasks.perfectible import TASK_FILE
from ..train.loss_scaling import LossScaler
from ..train.parallel.tree_hash import hash_tree
from ..train.sharded_optimizer import ShardedOptimizer
from ..train.state import TrainState
from .ledger_head import architecture, other_frozen_weight, run_layout
from .sharded_checkpoints import MOMENT_NAMES, MOMENTS, NamedMoment, load_sharded, place, save_sharded

SMALL_FILE = "trainer/state.json"
# Added to the name of a checkpoint that cannot be used. A new one can then take its place, and the old one is
# kept.
DAMAGED = ".damaged"
# Before the names of the weights of earlier steps in STATE_FILE (rollout/older_weights.py).
_OLDER = "older_weights"
# What the ledger has a hash of, in words.
_HASHED = {"weights": "weights", "optimizer": "optimizer's moments"}


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


class _TrainingState(BaseModel):
    """The content of SMALL_FILE; see Checkpoint."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    step: int = Field(ge=0)
    version: int = Field(ge=0)
    updates: int = Field(ge=0)
    chain: str
    scaler: dict[Literal["scale", "clean", "in_a_row"], int | float]
    logs: dict[str, str]
    older_versions: list[int] = Field(default_factory=list)


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
    optimizer, staging, master, moments, beside = state.optimizer, None, None, [], {}
    if isinstance(optimizer, ShardedOptimizer):
        staging, beside = save_sharded(optimizer, target, state.ranks), optimizer.collect_beside()
    else:
        master, moments = optimizer.collect_master(), optimizer.collect_moments()
    if not state.ranks.first:
        return
    ledger.sync()
    before = state.older_weights.before if state.older_weights else []
    small = {
        "step": state.step,
        "version": state.version,
        "updates": optimizer.updates,
        "chain": ledger.chain,
        "scaler": state.scaler.state,
        "logs": logs,
        "older_versions": [snapshot.version for snapshot in before],
    }
    texts = extra | {SMALL_FILE: json.dumps(small, indent=1) + "\n"}
    if staging is not None:
        config = state.policy.config

        def fill(folder: Path) -> None:
            place(staging, folder)
            write_config(folder, config, torch.float32)

        write_folder(target, fill, companions, texts, beside or None)
        _drop_old(state, target)
        return
    tensors = dict(zip(MOMENT_NAMES, moments, strict=True)) | optimizer.layout.beside_checkpoint(master)
    tensors |= _older_tensors(before)
    if isinstance(optimizer.layout, AdapterLayout):
        made_here = state.config.model.startswith("init:")
        base = str(companions.absolute()) if made_here else state.config.model
        write_adapter(target, optimizer.layout, master, base, companions, texts, tensors)
    else:
        write_checkpoint(target, optimizer.layout, master, companions, texts, state=tensors)
    _drop_old(state, target)


def _drop_old(state: TrainState, target: Path) -> None:
    """Delete the oldest checkpoints beside `target`, so that config.checkpoint.keep are left."""
    keep = state.config.checkpoint.keep  # 0 keeps all
    for folder in checkpoint_folders(target.parent.parent)[keep:] if keep else []:
        # Renamed first, so that a half-deleted folder does not look like a checkpoint.
        dropped = folder.with_name(f".{folder.name}.dropped")
        folder.rename(dropped)
        shutil.rmtree(dropped)


def open_checkpoint(folder: Path) -> tuple[Checkpoint | None, str]:
    """The checkpoint and ""; or None and what is wrong with it, with the name of the file."""
    if damage := manifest_damage(folder):
        return None, damage
    path = folder / SMALL_FILE
    try:
        checkpoint = Checkpoint(folder, **vars(_TrainingState.model_validate(read_json(path))))
    except (OSError, ValueError, TypeError) as error:  # pydantic's ValidationError is a ValueError
        return None, f"{path} is no training state ({type(error).__name__})"
    if folder.name != f"step-{checkpoint.step:06d}":
        return None, f"{folder} holds step {checkpoint.step}"
    return checkpoint, ""


def checked_checkpoint(folder: Path, ledger: LedgerFile) -> tuple[Checkpoint | None, str]:
    """The checkpoint and "", if it is intact and has the bits that this ledger holds the hashes of.

    Otherwise None and what is wrong, with the name of the file.
    """
    checkpoint, damage = open_checkpoint(folder)
    if checkpoint is None:
        return None, damage
    if ledger.chain_at(checkpoint.step) != checkpoint.chain:
        return None, f"{folder} is not a checkpoint of {ledger.path}"
    try:
        if wrong := _wrong_state(checkpoint, ledger):
            return None, f"{folder}: {wrong}; the file was altered"
        line = ledger.lines[checkpoint.step - 1] if checkpoint.step else None
        different = different_bits(folder, ledger.head, line.quantities if line else {})
    except (ValueError, OSError) as error:
        return None, str(error)
    if different:
        return None, f"the {different} in {folder} are not those whose hash is in {ledger.path}"
    return checkpoint, ""


def _wrong_state(checkpoint: Checkpoint, ledger: LedgerFile) -> str | None:
    """What in the small files of a checkpoint is not what the ledger says; None if all is.

    Raises ValueError for a config.json that is no model's.
    """
    settings = ledger.head.settings
    for name, value in architecture(checkpoint_config(checkpoint.folder)).items():
        if (was := settings.get(f"model.{name}")) != json.loads(json.dumps(value)):
            return f"{name} is {shown(value)} in config.json, and {shown(was)} in the ledger"
    task = read_json(checkpoint.folder / TASK_FILE)
    if task != {"task": settings["task.name"], "options": settings["task.options"]}:
        return f"{TASK_FILE} names another task than the ledger"
    line = ledger.lines[checkpoint.step - 1] if checkpoint.step else None
    updates, scaler = (line.updates, line.notes["scaler"]) if line else (0, {"clean": 0, "in_a_row": 0})
    counters = {"updates": updates, "version": updates} | scaler
    held = checkpoint.scaler | {"updates": checkpoint.updates, "version": checkpoint.version}
    for name, value in counters.items():
        if held.get(name) != value:
            return f"{name} is {held.get(name)} in {SMALL_FILE}, and {value} in the ledger"
    return None


def unchecked(checkpoint: Checkpoint, ledger: LedgerFile) -> list[str]:
    """What of an intact checkpoint the ledger has no hash of."""
    hashes = ledger.lines[checkpoint.step - 1].quantities if checkpoint.step else {}
    unhashed = [words for name, words in _HASHED.items() if checkpoint.step and name not in hashes]
    return unhashed + (["weights of earlier steps"] if checkpoint.older_versions else [])


def usable_checkpoint(folder: Path, ledger: LedgerFile, config: Config) -> tuple[Checkpoint | None, str]:
    """The checkpoint and "", if a run can go on from it or a replay can begin at it; or None and why not."""
    if config.samples_older_weights:
        return None, (
            f"{folder} does not hold the older weights that max_staleness or perturb.delay samples from"
        )
    return checked_checkpoint(folder, ledger)


def different_bits(folder: Path, head: Head, hashes: Mapping[str, str]) -> str | None:
    """The first quantity whose bits in the checkpoint differ from its hash; None where no quantity does.

    head: of the ledger; it has the hashes of the frozen weights. hashes: name -> hash, from the step's line
    in the ledger. A quantity without a hash is not checked. Raises ValueError for a checkpoint of another
    model.
    """
    layout = run_layout(checkpoint_config(folder), head)

    def root(*flat: torch.Tensor) -> str:
        return hash_tree(layout.blocks, *flat).root

    if "weights" in hashes or layout.frozen:
        weights = read_trained(folder, layout)
        if "weights" in hashes and root(weights) != hashes["weights"]:
            return _HASHED["weights"]
        frozen = layout.frozen_views(weights[layout.trained_numel :])
        if name := other_frozen_weight(frozen.items(), head):
            return f"frozen weights ({name})"
    with _moments(folder, layout) as moments:
        if "optimizer" in hashes and root(*(part[:] for part in moments)) != hashes["optimizer"]:
            return _HASHED["optimizer"]
    return None


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
def _moments(folder: Path, layout: FlatLayout) -> Iterator[list[Any]]:
    """The moments in a checkpoint, [layout.trained_numel] fp32 each, which can be read slice by slice.

    They are in STATE_FILE, or, of weights that FSDP had sharded, in MOMENTS. Raises ValueError where they are
    of another model.
    """
    path = folder / STATE_FILE
    if (folder / MOMENTS).is_dir():
        yield [NamedMoment(folder, layout, moment) for moment in MOMENT_NAMES]
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


@torch.no_grad()
def restore(state: TrainState, checkpoint: Checkpoint) -> None:
    """Put weights, optimizer, loss scale and counters back.

    Raises ValueError when the files do not fit the model.
    """
    optimizer, older, folder = state.optimizer, state.older_weights, checkpoint.folder
    if older is not None:
        older.reset(read_older(checkpoint, older.lag, state.policy.layout.numel))
    if not isinstance(optimizer, ShardedOptimizer):
        optimizer.load(read_trained(folder, optimizer.layout), checkpoint.updates)
        has_moments = False
    else:
        has_moments = load_sharded(optimizer, folder, checkpoint.updates, state.ranks)
        optimizer.load_beside(_read_beside(folder, optimizer.layout))
    if not has_moments:
        with _moments(folder, optimizer.layout) as moments:
            optimizer.load_moments([stored[optimizer.slices.own] for stored in moments])
    state.scaler.load(checkpoint.scaler)
    _begin_at(state, checkpoint.step, checkpoint.version)


@torch.no_grad()
def rewind(state: TrainState, master: torch.Tensor) -> None:
    """Put the state back to before the first step. master: the first weights, [layout.numel] fp32."""
    for moment in state.optimizer.moments:
        moment.zero_()
    state.optimizer.load(master, updates=0)
    if state.older_weights is not None:
        state.older_weights.reset()
    state.scaler.load(LossScaler(state.config.precision, state.policy.dtype).state)
    _begin_at(state, 0, 0)


def _begin_at(state: TrainState, step: int, version: int) -> None:
    state.step, state.version = step, version
    state.sampler.sync_weights(version)


def clear_leftovers(run: Path) -> None:
    """Remove what a killed process left half-written or half-deleted in the folder of a run."""
    for pattern in ("checkpoints/.step-*.partial-*", "checkpoints/.step-*.dropped", ".*.partial-*"):
        for path in run.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
