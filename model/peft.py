"""LoRA adapters as PEFT stores them: adapter_config.json and adapter_model.safetensors.

PEFT opens what is written here (peft.PeftModel.from_pretrained), and what PEFT writes is read here. A setting
of adapter_config.json that would change what an adapter computes is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..files.reading import read_json, shown
from .adapters import AdapterLayout
from .checkpoint import DTYPES
from .checkpoint_writing import write_folder
from .config import ModelConfig
from .lora import TARGETS, Lora, matrix_kinds
from .tensor_checks import but_for_the_prefix, check_finite
from .weight_files import open_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Keys of adapter_config.json that change nothing of what a loaded adapter computes.
_FREE = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",  # the tensors say it
    "task_type",
}
# Keys with a value that is read or must have this one. Every other key must be off.
_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # others change the base
}
_REMEDIES = {
    "lora_dropout": "set it to 0 there to go on without it",
    "use_rslora": "set it to false and lora_alpha to lora_alpha times sqrt(r), which is the same adapter",
}


class AdapterConfig(NamedTuple):
    """What adapter_config.json says."""

    rank: int
    alpha: float
    base: str  # folder or hub name of the base; empty where the file does not say


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read folder/adapter_config.json.

    Raises ValueError where there is none, and for an adapter that is no plain LoRA, with the setting's name.
    """
    path = folder / CONFIG
    try:
        raw = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"lora: {folder} holds no {CONFIG}; give the folder of a PEFT adapter") from None
    except ValueError as error:
        raise ValueError(f"lora: {path} {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"lora: {path} must hold a JSON object")
    rank, alpha = raw.pop("r", None), raw.pop("lora_alpha", None)
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not 0 < alpha < 1e37:
        raise ValueError(f"lora: {path}: r ({shown(rank)}) and lora_alpha ({shown(alpha)}) must be positive")
    for key, value in raw.items():
        if key not in _FREE and (value not in _VALUES[key] if key in _VALUES else value):
            remedy = _REMEDIES.get(key, "only plain LoRA is built")
            raise ValueError(f"lora: {path}: {key[:100]} ({shown(value)}) is refused; {remedy}")
    return AdapterConfig(rank, float(alpha), str(raw.get("base_model_name_or_path") or ""))


def read_adapter(folder: Path, layout: AdapterLayout) -> torch.Tensor:
    """The adapters of a PEFT folder, [layout.numel] fp32.

    Raises ValueError for an adapter of another rank, alpha, targets or model, and names what differs.
    """
    config = read_adapter_config(folder)
    for name in ("rank", "alpha"):
        wanted, stored_value = getattr(layout.lora, name), getattr(config, name)
        if wanted != stored_value:
            raise ValueError(f"lora: {name} ({wanted:g}) must be {stored_value:g}, as in {folder / CONFIG}")
    flat = torch.zeros(layout.numel)
    wanted, path = layout.checkpoint_views(flat), folder / WEIGHTS
    try:
        with open_tensors(path) as stored:
            for name in stored.keys():  # noqa: SIM118 (it is no dict)
                _take(name, stored.get_tensor(name), wanted, path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"lora: {path} is missing, corrupt or incomplete ({error})") from None
    if wanted:
        raise ValueError(f"lora: {path} lacks {next(iter(wanted))}; set lora.targets to those of the adapter")
    return flat


def _take(name: str, tensor: torch.Tensor, wanted: dict[str, torch.Tensor], path: Path) -> None:
    target = wanted.pop(name, None)
    if target is None:
        raise ValueError(
            f"lora: {path} holds {name[:200]}, which lora.targets and the model have no place for"
            f"{but_for_the_prefix(name, wanted)}"
        )
    if tensor.shape != target.shape or tensor.dtype not in DTYPES.values():
        raise ValueError(
            f"lora: {path}: {name} is {tuple(tensor.shape)} {tensor.dtype}, and must be "
            f"{tuple(target.shape)} in fp32, bf16 or fp16; is it of another model?"
        )
    check_finite(f"lora: {path}", name, tensor)
    target.copy_(tensor)


def stored_lora(folder: Path) -> Lora:
    """The shape of the adapters in a PEFT folder: rank and alpha from its config, targets from its tensors.

    Raises ValueError (see read_adapter_config).
    """
    config, path = read_adapter_config(folder), folder / WEIGHTS
    try:
        with open_tensors(path) as stored:
            names = list(stored.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"lora: {path} is missing, corrupt or incomplete ({error})") from None
    modules = {f"{name.split('.')[-3]}.weight" for name in names if name.count(".") > 2}
    targets = {target for name in modules for target in matrix_kinds(name)}
    if not targets:
        raise ValueError(
            f"lora: {path} holds no adapter of {', '.join(TARGETS)}, named MODULE.lora_A.weight; its first "
            f"tensor is {shown(min(names, default=''))}"
        )
    return Lora(config.rank, config.alpha, tuple(name for name in TARGETS if name in targets))


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and no whole model."""
    return (folder / CONFIG).exists() and not (folder / "config.json").exists()


def checkpoint_config(folder: Path) -> ModelConfig:
    """The model of a run's checkpoint. Beside adapters its config.json lies in trainer/.

    Raises ValueError (see ModelConfig.from_file).
    """
    return ModelConfig.from_file(folder / "trainer" if is_adapter(folder) else folder)


def write_adapter(
    target: Path,
    layout: AdapterLayout,
    flat: torch.Tensor,
    base: str,
    companions: Path | None = None,
    extra: Mapping[str, str] | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the adapters `flat` [layout.numel] fp32 as a PEFT folder `target`.

    base: folder or hub name of the model that they belong to; its config.json is written to trainer/. The
    others, and the errors: see checkpoint_writing.write_checkpoint.
    """

    def fill(folder: Path) -> None:
        views = {name: x.detach().cpu().contiguous() for name, x in layout.checkpoint_views(flat).items()}
        save_file(views, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(adapter_fields(layout, base), indent=2) + "\n")

    base_config = {"trainer/config.json": json.dumps(layout.model.config.raw, indent=2) + "\n"}
    write_folder(target, fill, companions, base_config | dict(extra or {}), state)


def adapter_fields(layout: AdapterLayout, base: str) -> dict[str, Any]:
    """The adapter_config.json of adapters. base: folder or hub name of the model that they belong to."""
    lora, modules = layout.lora, {adapter.module.rpartition(".")[2] for adapter in layout.adapters}
    targets = sorted(modules, key=lambda name: TARGETS.index(matrix_kinds(f"{name}.weight")[0]))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "target_modules": targets,
    }
