"""Writing of Hugging Face checkpoints. checkpoint.py reads them.

transformers.AutoModelForCausalLM and vLLM open what is written here. A checkpoint appears under its name only
when it is whole: it is written to a temporary folder beside it, synced, and renamed.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..files.inputs import read_bytes
from ..files.writing import os_error_line, sync, write_manifest
from .checkpoint import COMPANIONS
from .config import ModelConfig
from .weight_files import INDEX
from .weights import Layout

SHARD_BYTES = 5 << 30
STATE_FILE = "trainer/state.safetensors"


def write_checkpoint(
    target: Path,
    layout: Layout,
    flat: torch.Tensor,
    companions: Path | None = None,
    extra: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write `flat` [layout.numel] as a checkpoint folder `target`, in flat's dtype.

    companions: folder whose tokenizer and chat files are copied.
    extra: further files, name -> text.
    state: tensors that are not weights, for STATE_FILE. STATE_FILE lies in a folder of its own, because vLLM
        takes every safetensors file beside the weights for weights.

    A manifest (files/writing.py) lists the hash of every file. Raises FileExistsError when `target` exists.
    Raises OSError when it cannot be written, and leaves nothing behind.
    """

    tensors = layout.stored_tensors(flat)
    write_tensors(target, layout.config, tensors, companions, extra, shard_bytes, state)


def write_tensors(
    target: Path,
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    companions: Path | None = None,
    extra: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """As write_checkpoint, of the weights `tensors` as they are stored, by their names in the checkpoint."""

    def fill(folder: Path) -> None:
        _write_tensors(folder, tensors, shard_bytes)
        write_config(folder, config, next(iter(tensors.values())).dtype)

    write_folder(target, fill, companions, extra, state)


def write_folder(
    target: Path,
    fill: Callable[[Path], None],
    companions: Path | None = None,
    extra: Mapping[str, str] | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Make the checkpoint folder `target`, whose weights `fill` writes. The others: see write_checkpoint."""
    if target.exists():
        raise FileExistsError(f"checkpoint: {target} already exists; nothing was overwritten")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        temporary.mkdir()
        fill(temporary)
        for name in COMPANIONS:
            if companions is not None and (companions / name).exists():
                shutil.copyfile(companions / name, temporary / name)
        for name, content in (extra or {}).items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_text(content)
        if state is not None:
            (temporary / STATE_FILE).parent.mkdir(exist_ok=True)
            save_file(
                {name: x.detach().cpu().contiguous() for name, x in state.items()}, temporary / STATE_FILE
            )
        write_manifest(temporary)
        temporary.rename(target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # The file's name is left out: it is that of a folder that is gone now.
        has_number = isinstance(error, OSError) and error.errno is not None
        reason = os_error_line(OSError(error.errno, error.strerror)) if has_number else error
        raise OSError(
            f"checkpoint: {target} could not be written ({reason}); nothing of it was kept"
        ) from None


def different_companion(a: Path, b: Path) -> str | None:
    """The first tokenizer or chat file that two model folders do not have with the same bytes; or None."""

    def content(path: Path) -> bytes | None:
        return read_bytes(path) if path.exists() else None

    return next((name for name in COMPANIONS if content(a / name) != content(b / name)), None)


def config_fields(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json that was read, with `dtype` in place of the old dtype, and of unquantised weights."""
    replaced = ("torch_dtype", "quantization_config")
    fields = {name: value for name, value in config.raw.items() if name not in replaced}
    return fields | {"dtype": str(dtype).split(".")[1]}


def write_config(folder: Path, config: ModelConfig, dtype: torch.dtype) -> None:
    """Write config.json; see config_fields."""
    (folder / "config.json").write_text(json.dumps(config_fields(config, dtype), indent=2) + "\n")


def _write_tensors(folder: Path, views: Mapping[str, torch.Tensor], shard_bytes: int) -> None:
    """Write one model.safetensors, or shards with an index where it would exceed `shard_bytes`."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, view in views.items():
        if shards[-1] and size + view.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = view.detach().cpu().contiguous()
        size += view.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(view.nbytes for view in views.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
