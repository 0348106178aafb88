"""The weights of a live engine as hashes: run this in the process that holds the model.

A server of vLLM has an extension of its workers, and answers over HTTP:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls zerokl.integrations.weights.ServedWeights
    zerokl weights http://localhost:8000 CHECKPOINT

An engine in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), or one that takes a function
(VLLM_ALLOW_INSECURE_SERIALIZATION=1), writes a file, as does any torch module:

    llm.apply_model(partial(write_weight_hashes, path="engine.json"))
    zerokl weights engine.json CHECKPOINT
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..engine.runs.checks.tensor_hashes import Hashes, tensor_hashes, write_hashes
from ..model.operations import ANY_SIZES, known_rows

# All experts of a layer in one tensor: vLLM's RoutedExperts, and transformers 5.
_EXPERTS = re.compile(r"experts\.(routed_experts\.)?(?P<kind>w13_weight|w2_weight|gate_up_proj|down_proj)$")
_FUSED_EXPERTS = ("w13_weight", "gate_up_proj")


def write_weight_hashes(model: torch.nn.Module, path: str | Path) -> None:
    """Write the hashes of a module's parameters, by the names of its checkpoint.

    Nothing of the model changes. Raises ValueError where the file exists, and as `weight_hashes`.
    """
    write_hashes(weight_hashes(model), Path(path))


def weight_hashes(model: torch.nn.Module) -> Hashes:
    """The hashes of a module's parameters, by the names of its checkpoint.

    What vLLM fuses (qkv_proj, gate_up_proj) is split again; the sizes come from model.config. Experts in one
    tensor, as vLLM and transformers 5 keep them, get a name each. A weight that vLLM for CPUs has packed is
    read through its own product. Raises ValueError where a fused weight has another size, as one rank's
    part of it has, and where the engine has dropped a weight otherwise.
    """
    hashes: Hashes = {}
    for name, parameter in model.named_parameters():
        is_packed = not parameter.numel()
        rows = tensor_hashes(_split(name, _unpacked(model, name) if is_packed else parameter, model.config))
        hashes |= {part: row | {"unsigned_zeros": True} for part, row in rows.items()} if is_packed else rows
    return hashes


class ServedWeights:
    """vLLM's --worker-extension-cls: a method that its endpoint /collective_rpc calls in each worker."""

    def zerokl_weight_hashes(self) -> dict[str, Any]:
        """{"tensors": weight_hashes} of this worker, or {"refused": why not}."""
        try:
            return {"tensors": weight_hashes(self.get_model())}
        except ValueError as error:
            return {"refused": str(error)}


def _unpacked(model: torch.nn.Module, name: str) -> torch.Tensor:
    """A weight that vLLM for CPUs has packed and dropped: what its product makes of the identity.

    Each output is one weight and zeros, so it is exact, but for the sign of a zero. Raises ValueError where
    the engine has dropped it otherwise.
    """
    module_name, _, kind = name.rpartition(".")
    module = dict(model.named_modules()).get(module_name)
    if kind != "weight" or not hasattr(module, "cpu_linear"):
        raise ValueError(
            f"weights: {name} is empty: the engine has dropped it, and it cannot be hashed any more"
        )
    identity = torch.eye(module.input_size_per_partition, dtype=module.weight.dtype)
    return module.cpu_linear(identity, module.weight, None).T


def _split(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter by the names of its checkpoint. config: of the module. Raises ValueError."""
    if experts := _EXPERTS.search(name):
        yield from _experts(name[: experts.start()], experts["kind"] in _FUSED_EXPERTS, tensor)
        return
    fused = next((part for part in ("qkv_proj", "gate_up_proj") if f".{part}." in name), None)
    if fused is None:
        yield name, tensor
        return
    parts = _parts(fused, config)
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
