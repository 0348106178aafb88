"""Checkpoints that a run goes on from: saved whole, found by their hashes, restored to the bit.

RUN/checkpoints/step-NNNNNN is a Hugging Face checkpoint with the fp32 master weights; trainer/ inside it
holds the optimizer's moments (safetensors) and what else a step reads (JSON). NNNNNN steps are done. Nothing
that loads can run code.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...model.checkpoint import STATE_FILE, read_weights, write_checkpoint
from ...model.config import ModelConfig
from ...model.weights import Layout
from ...verify.files import manifest_damage
from ...verify.ledger import LedgerFile, hash_tree
from ..config import Config
from ..train.state import TrainState
from ..train.loss_scaling import LossScaler

SMALL_FILE = "trainer/state.json"
# Put after the name of a checkpoint that cannot be used, so that a new one finds its place and the old is not
# lost.
DAMAGED = ".damaged"
# The optimizer's moments in STATE_FILE, [layout.numel] fp32 each, whatever the number of ranks that wrote
# them.
_MOMENTS = ("first_moment", "second_moment")
# A LossScaler's whole state.
_SCALER = ("scale", "clean", "in_a_row")


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint, `step` steps into its run, whose ledger ended with `chain` then.

    scaler: the loss scaler's state. logs: the SHA-256 of metrics and rollouts as they were then.
    """

    folder: Path
    step: int
    version: int
    updates: int
    chain: str
    scaler: dict[str, float]
    logs: dict[str, str]


def save_checkpoint(
    state: TrainState, target: Path, companions: Path, extra: dict[str, str], logs: dict[str, str], keep: int
) -> None:
    """Write everything a resumed run needs, then drop all but the `keep` newest (0: all). For all ranks at
    once; the first one writes.

    Raises OSError, leaving nothing half-written.
    """
    optimizer = state.optimizer
    master, *moments = optimizer.collect_master(), *map(optimizer.slices.collect, optimizer.moments)
    if not state.ranks.first:
        return
    assert state.recorder is not None
    state.recorder.ledger.sync()  # a checkpoint never runs ahead of the ledger
    small = {
        "step": state.step, "version": state.version, "updates": optimizer.updates, "chain": state.recorder.ledger.chain,
        "scaler": {name: getattr(state.scaler, name) for name in _SCALER}, "logs": logs,
    }
    texts = extra | {SMALL_FILE: json.dumps(small, indent=1) + "\n"}
    write_checkpoint(target, optimizer.layout, master, companions, texts, state=dict(zip(_MOMENTS, moments, strict=True)))
    for folder in checkpoint_folders(target.parent.parent)[keep:] if keep else []:
        doomed = folder.with_name(f".{folder.name}.dropped")
        folder.rename(doomed)  # a half-deleted checkpoint never has the name of one
        shutil.rmtree(doomed)


def checkpoint_folders(run: Path) -> list[Path]:
    """The checkpoints of a run by name, newest first."""
    return sorted((p for p in run.glob("checkpoints/step-*") if p.is_dir() and p.name[5:].isdigit()), key=lambda p: -int(p.name[5:]))


def open_checkpoint(folder: Path) -> tuple[Checkpoint | None, str]:
    """The checkpoint, or None and what is wrong with it, naming the file."""
    if damage := manifest_damage(folder):
        return None, damage
    path = folder / SMALL_FILE
    try:
        small: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = Checkpoint(folder, **small)
    except (OSError, ValueError, TypeError) as error:
        return None, f"{path} is no training state ({type(error).__name__})"
    if folder.name != f"step-{found.step:06d}":
        return None, f"{folder} holds step {found.step}"
    return found, ""


def checked_checkpoint(folder: Path, ledger: LedgerFile) -> tuple[Checkpoint | None, str]:
    """An intact checkpoint of this ledger, with the bits whose hashes are in it; or None and what is wrong,
    naming the file.
    """
    found, damage = open_checkpoint(folder)
    if found is None:
        return None, damage
    if ledger.chain_at(found.step) != found.chain:
        return None, f"{folder} is not a checkpoint of {ledger.path}"
    try:
        other = _other_bits(folder, ledger.lines[found.step - 1].quantities) if found.step else None
    except ValueError as error:
        return None, str(error)
    return (None, f"the {other} in {folder} are not those whose hash is in {ledger.path}") if other else (found, "")


def usable_checkpoint(folder: Path, ledger: LedgerFile, config: Config) -> tuple[Checkpoint | None, str]:
    """A checkpoint that a run can go on from, or that a replay can begin at; or None and why not."""
    if config.samples_older_weights:
        return None, f"{folder} does not hold the older weights that max_staleness or mismatch.delay samples from"
    return checked_checkpoint(folder, ledger)


def _other_bits(folder: Path, hashes: Mapping[str, str]) -> str | None:
    """What the checkpoint holds other bits of, as far as the step's line in the ledger has its hash.

    Raises ValueError.
    """
    layout = Layout(ModelConfig.from_file(folder))

    def root(*flat: torch.Tensor) -> str:
        return hash_tree(*map(layout.checkpoint_views, flat)).root

    if "weights" in hashes and root(read_weights(folder, layout)) != hashes["weights"]:
        return "weights"
    with _moments(folder, layout) as moments:
        if "optimizer" in hashes and root(*(part[:] for part in moments)) != hashes["optimizer"]:
            return "optimizer's moments"
    return None


@contextmanager
def _moments(folder: Path, layout: Layout) -> Iterator[list[Any]]:
    """The moments in a checkpoint, [layout.numel] fp32 each, to be read by slices.

    Raises ValueError for another model's.
    """
    path = folder / STATE_FILE
    try:
        with safe_open(path, framework="pt") as stored:
            parts = [stored.get_slice(name) for name in _MOMENTS]
            for part, name in zip(parts, _MOMENTS, strict=True):
                if part.get_shape() != [layout.numel] or part.get_dtype() != "F32":
                    raise ValueError(f"checkpoint: {path}: {name} is of another model")
            yield parts
    except SafetensorError as error:
        raise ValueError(f"checkpoint: {path} is no optimizer state ({error})") from None


@torch.no_grad()
def restore(state: TrainState, checkpoint: Checkpoint) -> None:
    """Put weights, optimizer and counters back. Raises ValueError when the files do not fit the model."""
    optimizer = state.optimizer
    with _moments(checkpoint.folder, optimizer.layout) as moments:
        for mine, stored in zip(optimizer.moments, moments, strict=True):
            mine.copy_(stored[optimizer.slices.own])
    for name in _SCALER:
        setattr(state.scaler, name, checkpoint.scaler[name])
    optimizer.updates = checkpoint.updates
    _begin_at(state, read_weights(checkpoint.folder, state.policy.layout), checkpoint.step, checkpoint.version)


@torch.no_grad()
def rewind(state: TrainState, master: torch.Tensor) -> None:
    """Back to before the first step, with the first weights `master` [layout.numel]."""
    for moment in state.optimizer.moments:
        moment.zero_()
    state.optimizer.updates = 0
    state.scaler = LossScaler(state.config.precision, state.policy.dtype)
    _begin_at(state, master, 0, 0)


def _begin_at(state: TrainState, master: torch.Tensor, step: int, version: int) -> None:
    state.optimizer.load(master)
    state.step, state.version = step, version
    state.sampler.sync_weights(version)


def clear_leftovers(run: Path) -> None:
    """Remove what a killed process left half-written or half-deleted."""
    for pattern in ("checkpoints/.step-*.partial-*", "checkpoints/.step-*.dropped", ".*.partial-*"):
        for left in run.glob(pattern):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
