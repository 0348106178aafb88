"""Which checkpoints a run can go on from: intact ones, whose bits are those that its ledger has hashes of."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from ...files.reading import read_json, shown
from ...files.writing import manifest_damage
from ...model.peft import checkpoint_config
from ...verify.ledger import Head, LedgerFile
from ..config.run_config import Config
from ..tasks.perfectible import TASK_FILE
from ..train.parallel.tree_hash import hash_tree
from .ledger_head import architecture, other_frozen_weight, run_layout
from .trainer_state import SMALL_FILE, Checkpoint, read_trained, stored_moments

# Added to the name of a checkpoint that cannot be used. A new one can then take its place, and the old one is
# kept.
DAMAGED = ".damaged"
# What the ledger has a hash of, in words.
_HASHED = {"weights": "weights", "optimizer": "optimizer's moments"}


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
    with stored_moments(folder, layout) as moments:
        if "optimizer" in hashes and root(*(part[:] for part in moments)) != hashes["optimizer"]:
            return _HASHED["optimizer"]
    return None


def clear_leftovers(run: Path) -> None:
    """Remove what a killed process left half-written or half-deleted in the folder of a run."""
    for pattern in ("checkpoints/.step-*.partial-*", "checkpoints/.step-*.dropped", ".*.partial-*"):
        for path in run.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
