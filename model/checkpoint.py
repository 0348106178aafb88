"""Reading of Hugging Face checkpoints: single and sharded safetensors, of a local folder or a hub name.

checkpoint_writing.py writes them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..files.bitwise import equal
from ..files.inputs import check_folder
from ..files.reading import read_json, shown
from .buffers import BYTES, as_bytes
from .config import ModelConfig
from .decoder import COMPUTE, Decoder, Numerics
from .tensor_checks import but_for_the_prefix, check_finite
from .weight_files import StoredTensor, stored_tensors, tensor_files
from .weights import Layout

# Files that a checkpoint takes over from the model it came from, beside the weights.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
# The file by which a folder of peft is known.
_ADAPTER = "adapter_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Tensors that follow from config.json, which older versions of transformers stored beside the weights.
_BUFFERS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
# How many layers after the last one guess tokens ahead (multi-token prediction), where a family reads it.
_GUESSING = "num_nextn_predict_layers"
# The names of these dtypes in safetensors files.
_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def resolve_model(name: str) -> Path:
    """The local folder of a model: `name` itself, or a snapshot of the hub's repository of that name.

    Raises ValueError when `name` is neither a folder nor a repository that can be downloaded, and when it is
    an adapter or a run, which hold no model of their own. Raises InputError for a folder that holds something
    else than files and folders, such as a FIFO.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_folder(folder)
        _refuse_no_model(folder)
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(f"model: {name} is no folder, and no hub name (owner/name) either")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=["*.safetensors", "*.safetensors.index.json", "config.json", *COMPANIONS],
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model: {name} is no local folder and could not be had from the hub ({reason})"
        ) from None


def _refuse_no_model(folder: Path) -> None:
    """Raise ValueError for a LoRA adapter and for the folder of a run, with what to give instead."""
    if (folder / "config.json").exists():
        return
    if (folder / _ADAPTER).exists():
        raise ValueError(
            f"model: {folder} is a LoRA (PEFT) adapter{_base_of(folder / _ADAPTER)}, not a whole model; "
            f"merge it (zerokl merge {folder} FOLDER), and give FOLDER; to train it on, give the model it "
            "belongs to, and the adapter as lora.adapter"
        )
    if (folder / "config.toml").exists():
        steps = [p for p in folder.glob("checkpoints/step-*") if p.name[5:].isdecimal()]
        newest = max(steps, key=lambda p: int(p.name[5:]), default=None)
        told = f"give its newest checkpoint, {newest}" if newest else "it has no checkpoint yet"
        raise ValueError(f"model: {folder} is a run, not a model; {told}")


def _base_of(config: Path) -> str:
    """The model that an adapter belongs to, in words; empty where its config does not say."""
    try:
        raw = read_json(config)
    except ValueError:
        return ""  # what the folder is, is clear from the file's name
    base = raw.get("base_model_name_or_path") if isinstance(raw, dict) else None
    return f" of {shown(base)}" if isinstance(base, str) and base else ""


def read_weights(folder: Path, layout: Layout) -> torch.Tensor:
    """All weights as one flat fp32 tensor, [layout.numel]. fp32 holds every supported file dtype exactly.

    Raises ValueError and names the file or tensor that is missing, corrupt, left over, not finite or of
    another shape, and a head that differs from the embedding that it is tied to.
    """
    try:
        flat = torch.zeros(layout.numel, dtype=torch.float32)
    except RuntimeError:
        raise ValueError(
            f"model: config.json of {folder} asks for {layout.numel} weights, "
            "more than this machine has memory for"
        ) from None
    wanted = layout.checkpoint_views(flat)
    for stored in stored_tensors(folder):
        tensor = stored.read()
        target = _take(stored, tuple(tensor.shape), tensor.dtype, wanted, layout)
        if target is not None:
            check_finite(f"model: {stored.path}", stored.name, tensor)
            target.copy_(as_bytes(tensor) if stored.name in layout.buffers else tensor)
    _refuse_lacking(wanted, folder)
    _refuse_other_head(folder, layout)
    return flat


def read_rows(folder: Path, layout: Layout, rows: Mapping[str, slice]) -> dict[str, torch.Tensor]:
    """Some rows of each tensor of a model, in fp32, by the tensor's name. A critic's head has none.

    Nothing else of the files is read. Raises ValueError (see read_weights).
    """
    check_weights(folder, layout)
    parts = {}
    for stored in stored_tensors(folder):
        if stored.name in layout.buffers & rows.keys():
            numbers = stored.read()
            check_finite(f"model: {folder}", stored.name, numbers)
            parts[stored.name] = as_bytes(numbers)[rows[stored.name]]
        elif stored.name in rows:
            parts[stored.name] = stored.part()[rows[stored.name]].float()
        elif stored.name in layout.fused:
            parts |= _rows_of_experts(stored.part(), layout, stored.name, rows)
    for name, part in parts.items():
        if part.numel():
            check_finite(f"model: {folder}", name, part)
    return parts


def _rows_of_experts(
    stored: Any, layout: Layout, name: str, rows: Mapping[str, slice]
) -> dict[str, torch.Tensor]:
    """The rows of read_rows in a tensor that holds all experts of a layer, [E, n R, ...], n of each.

    Or in one that holds a weight under another name.
    """
    weight, shape = layout.fused[name]
    parts = layout.entries[weight].parts
    if len(shape) == 2:
        return {part: stored[rows[part]].float() for part, _ in parts}
    experts, width, _ = shape
    per_expert = len(parts) // experts
    read = {}
    for i, (part, n_rows) in enumerate(parts):
        start = i % per_expert * (width // per_expert)
        a, b, _ = rows[part].indices(n_rows)
        read[part] = stored[i // per_expert, start + a : start + b].float()
    return read


def check_weights(folder: Path, layout: Layout) -> None:
    """Check that a folder has every weight of `layout` and no others, from the headers of its files.

    Of the values a head is read that is tied to the embedding.

    Another library may fill in a missing weight at random. Raises ValueError (see read_weights).
    """
    wanted = layout.checkpoint_views(torch.empty(layout.numel, device="meta"))
    for stored in stored_tensors(folder):
        part = stored.part()
        dtype = _STORED_DTYPES.get(part.get_dtype(), part.get_dtype())
        _take(stored, tuple(part.get_shape()), dtype, wanted, layout)
    _refuse_lacking(wanted, folder)
    _refuse_other_head(folder, layout)


def check_values(folder: Path) -> None:
    """Check that every number of a folder's weights is finite, where another library reads them.

    Raises ValueError (see read_weights).
    """
    for stored in stored_tensors(folder):
        check_finite(f"model: {stored.path}", stored.name, stored.read())


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the weights in a folder; fp32 where they have several. It holds each of them exactly.

    Raises ValueError for a file that cannot be read, and for another dtype than those of DTYPES.
    """
    dtypes = {stored.part().get_dtype() for stored in stored_tensors(folder)}
    if unknown := dtypes - _STORED_DTYPES.keys():
        raise ValueError(f"model: {folder}: dtype {min(unknown)} is not supported; use unquantised weights")
    return _STORED_DTYPES[dtypes.pop()] if len(dtypes) == 1 else torch.float32


def _refuse_lacking(wanted: Mapping[str, torch.Tensor], folder: Path) -> None:
    if wanted:
        raise ValueError(f"model: {folder} lacks {len(wanted)} weights, the first being {next(iter(wanted))}")


def _refuse_other_head(folder: Path, layout: Layout) -> None:
    """Raise ValueError for a stored lm_head that differs from the embedding, where the config ties them.

    transformers would keep both, and compute other logits than a decoder with one of them.
    """
    if not layout.config.tied:
        return
    if not any(_HEAD in names for names in tensor_files(folder).values()):
        return  # the embedding, often the largest of all tensors, is not read for nothing
    pair = {x.name: x.read() for x in stored_tensors(folder) if x.name in (_EMBEDDING, _HEAD)}
    head, embedding = pair[_HEAD], pair[_EMBEDDING]
    wider = torch.promote_types(head.dtype, embedding.dtype)
    if head.shape != embedding.shape or not equal(head.to(wider), embedding.to(wider)):
        raise ValueError(
            f"model: {folder}: {_HEAD} differs from {_EMBEDDING}, though config.json ties them; set "
            "tie_word_embeddings to false there to have both, or leave the head out of the weights"
        )


def _take(
    stored: StoredTensor,
    shape: tuple[int, ...],
    dtype: torch.dtype | str,
    wanted: dict[str, torch.Tensor],
    layout: Layout,
) -> torch.Tensor | None:
    """Take the view of a tensor out of `wanted`; None for a tensor that is not needed.

    Raises ValueError for a tensor that has no place there, or has another shape or an unsupported dtype.
    """
    path, name = stored.path, stored.name
    if (name == _HEAD and layout.config.tied) or is_passed_over(name, layout.config):
        return None  # see _refuse_other_head
    target = _target(name, wanted, layout)
    if target is None:
        raise ValueError(
            f"model: {path} holds {name[:200]}, "
            f"which a {layout.config.architecture} of this config has no place for"
            f"{but_for_the_prefix(name, wanted)}"
        )
    wanted_shape = tuple(target.shape)
    if name in layout.buffers:
        wanted_shape = (target.numel() // BYTES,)
    if shape != wanted_shape:
        raise ValueError(f"model: {path}: {name} has shape {shape}, config.json asks for {wanted_shape}")
    if dtype not in DTYPES.values():
        raise ValueError(
            f"model: {path}: {name} has dtype {dtype}, which is not supported; use unquantised weights"
        )
    return target


def is_passed_over(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not needed, whatever it holds: no log-probability depends on it."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    guessing = range(config.layers, config.layers + (config.raw.get(_GUESSING) or 0))
    return name.endswith(_BUFFERS) or (layer.isdecimal() and int(layer) in guessing)


def _target(name: str, wanted: dict[str, torch.Tensor], layout: Layout) -> torch.Tensor | None:
    """Take the view of a tensor out of `wanted`, or the views of all tensors that it holds (Layout.fused)."""
    if name not in layout.fused:
        return wanted.pop(name, None)
    weight, shape = layout.fused[name]
    parts = [part for part, _ in layout.entries[weight].parts]
    if not wanted.keys() >= set(parts):
        return None
    first, *_ = [wanted.pop(part) for part in parts]
    strides = torch.empty(shape, device="meta").stride()
    return first.as_strided(shape, strides, first.storage_offset())


def load_decoder(
    folder: str | Path, dtype: torch.dtype, device: torch.device | None = None, numerics: Numerics = COMPUTE
) -> Decoder:
    """A decoder with the checkpoint's weights, rounded once to `dtype`, on the CPU or on `device`.

    Raises ValueError (see ModelConfig.from_file and read_weights).
    """
    folder = Path(folder)
    config = ModelConfig.from_file(folder)
    layout = Layout(config)
    return Decoder(config, read_weights(folder, layout).to(device, dtype), layout, numerics)
