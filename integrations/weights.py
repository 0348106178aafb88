"""The weights of a live engine as hashes: run this in the process that holds the model.

    llm.apply_model(partial(write_weight_hashes, path="engine.json"))

for vLLM, whose engine must then be in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), or take a function
(VLLM_ALLOW_INSECURE_SERIALIZATION=1). Of any other engine, call it with the torch module.

Then `zerokl weights engine.json CHECKPOINT` names the tensors that differ.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..engine.runs.checks.tensor_hashes import tensor_hashes, write_hashes
from ..model.operations import ANY_SIZES, known_rows

# All experts of a layer in one tensor: vLLM's RoutedExperts, and transformers 5.
_EXPERTS = re.compile(r"experts\.(routed_experts\.)?(?P<kind>w13_weight|w2_weight|gate_up_proj|down_proj)$")
_FUSED_EXPERTS = ("w13_weight", "gate_up_proj")


def write_weight_hashes(model: torch.nn.Module, path: str | Path) -> None:
    """Write the hashes of a module's parameters, by the names of its checkpoint.

    What vLLM fuses (qkv_proj, gate_up_proj) is split again; the sizes come from model.config. Experts in one
    tensor, as vLLM and transformers 5 keep them, get a name each. Nothing of the model changes. Raises
    ValueError where the file exists, where a fused weight has another size, and where the engine has dropped
    one, as vLLM for CPUs does.
    """
    write_hashes(tensor_hashes(_split(model)), Path(path))


def _split(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.named_parameters():
        if experts := _EXPERTS.search(name):
            yield from _experts(name[: experts.start()], experts["kind"] in _FUSED_EXPERTS, tensor)
            continue
        fused = next((part for part in ("qkv_proj", "gate_up_proj") if f".{part}." in name), None)
        if fused is None:
            yield name, tensor
            continue
        parts = _parts(fused, model.config)
        if not tensor.numel():
            raise ValueError(
                f"weights: {name} is empty: the engine has packed it and dropped it, as vLLM for CPUs does; "
                "it cannot be hashed any more"
            )
        if sum(parts.values()) != len(tensor):
            raise ValueError(
                f"weights: {name} has {len(tensor)} rows, its config says {sum(parts.values())}; a part of a "
                "sharded model cannot be hashed"
            )
        for part, rows in zip(parts, tensor.split(list(parts.values())), strict=True):
            yield name.replace(fused, part), rows


def _experts(prefix: str, gated: bool, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of each expert by the names of a Qwen3-MoE checkpoint.

    tensor: [E, 2 I, D] with gate and up (gated), or [E, D, I].
    """
    for e, expert in enumerate(tensor):
        parts = (
            zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True) if gated else [("down_proj", expert)]
        )
        for part, matrix in parts:
            yield f"{prefix}experts.{e}.{part}.weight", matrix


def _parts(fused: str, config: Any) -> dict[str, int]:
    """The rows of each part of a fused weight. config: of transformers, of any family."""
    sizes = replace(
        ANY_SIZES,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate_size=getattr(config, "intermediate_size", 0),  # some models of experts have none
    )
    return {
        row.name: row.width for row in known_rows(sizes) if row.vllm and row.vllm.module.endswith(f".{fused}")
    }
